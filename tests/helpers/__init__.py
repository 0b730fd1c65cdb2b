"""Helpers shared by the tests: build a batch for the hash model, and decode it the slow way."""

import dataclasses
import functools
import shutil
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import hub
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.rule import evidence, for_rows
from mars_jax.core.types import NO_TOKEN, Controls, Params, Prompts, Visible, keys_from_seeds

NO_WEIGHTS = Params(target=(), draft=())


def ragged(lengths, buffer, vocab, seed=0):
    """Return random prompts of the given lengths, left-aligned in a buffer that is filled up with junk, not zeros."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (len(lengths), buffer))
    # `jnp.asarray` compiles a program for every shape.
    return jax.device_put((tokens.astype(np.int32), np.asarray(lengths, np.int32)))


def normal(seed, *shape, dtype="float32"):
    """Return numbers of a normal distribution, rounded to float32 and then to the dtype. This compiles nothing."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jax.device_put(numbers.astype(jnp.dtype(dtype)))


def draft_input(state, keys=None):
    """Return the input of a drafter for the state."""
    keys = state.keys if keys is None else keys
    return DraftInput(keys=keys, tokens=state.tokens, length=state.length, controls=state.controls)


NUMBERS = ("theta", "max_relaxed_run", "tau")


@flax.struct.dataclass(kw_only=True)
class Rows(Controls):
    """Controls plus per-row numbers of the rule under test. None keeps the rule's own number."""

    theta: Any = None
    max_relaxed_run: Any = None


def make_rows(batch, **settings):
    """Return `make_controls` of the settings, together with the per-row numbers of a rule."""
    numbers = {name: settings.pop(name) for name in ("theta", "max_relaxed_run") if name in settings}
    controls = make_controls(batch, **settings)
    fields = {f.name: getattr(controls, f.name) for f in dataclasses.fields(controls)}
    dtypes = {"theta": jnp.float32, "max_relaxed_run": jnp.int32}
    spread = {n: jnp.broadcast_to(jnp.asarray(v, dtypes[n]), (batch,)) for n, v in numbers.items()}
    return Rows(**fields, **spread)


def with_numbers(rule, **numbers):
    """Return the rule with new values for those of the numbers that it has."""
    fields = {f.name for f in dataclasses.fields(rule)}
    dtypes = {"max_relaxed_run": jnp.int32}
    values = {k: v for k, v in numbers.items() if k in fields and v is not None}
    return dataclasses.replace(
        rule, **{k: jnp.asarray(v, dtypes.get(k, jnp.float32)) for k, v in values.items()}
    )


def judge(rule):
    """Return `(keys, tree, logits, rows, hidden=, params=) -> Verdict` of a rule, with the numbers of the rows."""

    def decide(keys, tree, logits, rows, **options):
        numbers = {name: getattr(rows, name, None) for name in NUMBERS}
        row_rule = for_rows(with_numbers(rule, **numbers), tree.tokens.shape[0])
        return row_rule(evidence(tree, logits, keys=keys, controls=rows, **options))[0]

    return decide


@jax.jit
def verdict_of(rule, keys, tree, logits, rows):
    """Return the verdict of a rule. Its numbers are arguments: rules of one structure share a program."""
    return judge(rule)(keys, tree, logits, rows)


def begin(
    target,
    drafter,
    rule,
    prompts,
    lengths,
    *,
    controls=None,
    seeds=None,
    params=NO_WEIGHTS,
    chunk=16,
    **settings,
):
    """Return a decoder and the state of a batch before its first step. `settings` are those of `make_controls`."""
    batch, buffer = prompts.shape
    if controls is None:
        controls = make_controls(batch, **{"limit": buffer, **settings})
    if not isinstance(seeds, jax.Array):
        # Seeds in host memory: JAX compiles nothing to create them.
        seeds = np.asarray(range(batch) if seeds is None else seeds, np.uint32)
    decoder = decode.speculative_decoder(target, drafter, rule, prefill_chunk=chunk)
    batch = Prompts(prompts, lengths, controls, rule, keys_from_seeds(seeds))
    return decoder, decode.start(decoder, params, batch)


def decode_all(
    target, drafter, rule, prompts, lengths, *, limit=None, seeds=None, params=NO_WEIGHTS, **settings
):
    """Decode to the end and return (state, stats). Every row has two stop tokens, so that all calls share a program."""
    batch, buffer = prompts.shape
    stops = list(settings.pop("stop_tokens", ()))
    stops = stops if stops and isinstance(stops[0], list) else [stops] * batch
    settings["stop_tokens"] = [[*row, NO_TOKEN, NO_TOKEN][: max(2, len(row))] for row in stops]
    rule = with_numbers(rule, **{name: settings.pop(name) for name in NUMBERS if name in settings})
    settings["limit"] = buffer if limit is None else limit
    decoder, state = begin(target, drafter, rule, prompts, lengths, seeds=seeds, params=params, **settings)
    return decode.run(decoder, params, state)


def decode_rows(target, drafter, rule, prompts, lengths, rows=slice(None), *, params, **settings):
    """Decode some rows of a batch; return their tokens and the counters. `settings` holds values for all rows."""
    index = np.arange(len(lengths))[rows]
    settings = {name: [values[i] for i in index] for name, values in settings.items()}
    state, stats = decode_all(
        target, drafter, rule, prompts[index], lengths[index], seeds=index.tolist(), params=params, **settings
    )
    return committed(state), stats


def slow_but(values, *fast):
    """Return the values for `parametrize`; all but those in `fast` are marked slow."""

    def arguments(value):
        return value if type(value) is tuple else (value,)  # a named tuple is one value

    return [v if v in fast else pytest.param(*arguments(v), marks=pytest.mark.slow) for v in values]


@jax.jit
def one_row(batch, row):
    """Return a row of a tree of arrays as a batch of one. Outside jit, a slice would compile once per row."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), batch)


def logits_after(model, tokens, *, width):
    """Return the logits f32[V] of a model without weights after a list of tokens, padded to one width."""
    padded = np.full((1, width), 99, np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_last_logits(model, jnp.asarray(padded), jnp.int32(len(tokens))))


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model, tokens, length):
    width = tokens.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None]
    mask = (position[:, None, :] <= position[:, :, None]) & (position < length)[:, None, :]
    zero = jnp.zeros((1,), jnp.int32)
    visible = Visible(first=zero, positions=position, slot=zero, seen=mask)
    out = model.forward((), tokens, visible, model.init_cache(1, width))
    return model.unembed((), out.hidden)[0, length - 1]


def broken_after(model):
    """Wrap a model without weights. The new params are a mask bool[V]: logits after a masked token are NaN."""

    def forward(is_broken, tokens, visible, cache):
        output = model.forward((), tokens, visible, cache)
        flag = (is_broken[tokens] & (tokens >= 0))[:, :, None].astype(jnp.uint32)
        return output._replace(hidden=jnp.concatenate([output.hidden, flag], axis=2))

    def unembed(is_broken, hidden):
        return jnp.where(hidden[:, :, 1:] > 0, jnp.nan, model.unembed((), hidden[:, :, :1]))

    return model._replace(forward=forward, unembed=unembed)


def noisy_copy(target, path):
    """Copy a checkpoint and add noise to its weights: as a draft model it often picks the target's runner-up."""
    shutil.copytree(target, path)
    loaded = hub.load(str(target))
    leaves, tree = jax.tree.flatten(loaded.params)
    rng = np.random.default_rng(0)
    noisy = [np.asarray(x) * (1 + 0.25 * rng.normal(size=x.shape)).astype(np.float32) for x in leaves]
    hub.save(path, loaded.config, jax.tree.unflatten(tree, noisy), overwrite=True)
    return path


def committed(state):
    """Return the committed tokens of each row, as lists."""
    tokens, length = jax.device_get((state.tokens, state.length))
    return [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]
