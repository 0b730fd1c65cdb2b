"""Modules of Flax as language models, and our params as nnx state.

A module is taken as it is, through one function that calls it. **The contract** of a call
`(tokens i32[B, N], positions i32[B, N], mask bool[B, N, S], cache, slot i32[B]) -> (logits, cache)`:

- Writes precede reads: the rows of the N tokens go into slots `slot[b] .. slot[b] + N - 1` of the cache, and then each
  token attends to what the mask says of the whole cache, its own row among it. Nothing else is read.
- A slot is not a position: rotary embeddings take `positions`. Nodes of a tree that stand at one depth share theirs.
- Padding is clipped: a token below 0 arrives as 0, and nothing reads what comes of it.
- Rows are independent, and the call is pure: the cache that is given stays what it is.
- Build once: a module that is bridged twice with the same functions is one model, so nothing compiles again. A lambda
  that is made again is another function.

`check` tries a model against it. Oracle: transformers' logits through our own transformer
(tests/integrations/test_bridge.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core.errors import MarsError
from mars_jax.core.types import ForwardOutput, LanguageModel, PyTree, Visible

__all__ = ["Cache", "check", "from_linen", "from_nnx", "params_of", "to_nnx"]


class Cache:
    """Functions that open a cache whose leaves are not [B, S, ...]; see `LanguageModel`.

    Args:
      slots: cache -> S.
      commit: (cache, start i32[B], path i32[B, D + 1]) -> cache; moves the rows of an accepted path into a row. Only
        trees call it.
      put: (cache, rows i32[b], new) -> cache; default: every leaf begins with B.
    """

    def __init__(
        self,
        slots: Callable[[PyTree], int] = kv_cache.slots,
        commit: Callable[[PyTree, Array, Array], PyTree] = kv_cache.commit,
        put: Callable[[PyTree, Array, PyTree], PyTree] = kv_cache.put,
    ):
        self.slots, self.commit, self.put = slots, commit, put


_DEFAULT = Cache()


def _call(module: Any, tokens: Array, positions: Array, mask: Array, cache: PyTree, slot: Array) -> Any:
    return module(tokens, positions, mask, cache, slot)


def from_nnx(
    module: Any,
    *,
    vocab_size: int,
    init_cache: Callable[[int, int], PyTree],
    call: Callable[..., tuple[Array, PyTree]] = _call,
    unembed: Callable[[Any, Array], Array] | None = None,
    embed: Callable[[Any, Array], Array] | None = None,
    cache: Cache = _DEFAULT,
    prefill_chunk: int | None = None,
) -> tuple[LanguageModel, PyTree]:
    """A `flax.nnx` module as a language model, and its state as the params to pass.

    Args:
      module: any module that `call` calls. It is split here; a trainer's later weights are `nnx.state(module)`, or for
        params alone what `nnx.update` made of it.
      vocab_size: V.
      init_cache: (batch, slots) -> the cache, a pytree of arrays.
      call: `(module, tokens, positions, mask, cache, slot) -> (logits [B, N, V], cache)`, as the module's contract says
        above; default: the module itself, called with these.
      unembed: `(module, hidden [B, N, E]) -> logits`, where `call` gives hidden states and not logits: so a prompt is
        read without logits, and rules and drafters that read hidden states can.
      embed: `(module, tokens i32[B, N]) -> [B, N, E]`, for drafters that share the target's embedding.
      cache: functions of a cache of one's own.
      prefill_chunk: prompt tokens per forward.

    Returns:
      (model, params), for `speculative_decoder`, `drafters.language_model` and `Pretrained.from_parts`.

    Raises:
      MarsError: what is given is no nnx module. When it is called: logits or a cache of another shape than promised.
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        raise MarsError(f"the module is a {type(module).__name__}: from_nnx takes a flax.nnx.Module.")
    graph, state = nnx.split(module)
    opened = functools.partial(nnx.merge, graph)
    return _bridged(
        _Merge(graph, opened), vocab_size, init_cache, call, unembed, embed, cache, prefill_chunk
    ), state


def from_linen(
    module: Any,
    *,
    vocab_size: int,
    init_cache: Callable[[int, int], PyTree],
    call: Callable[..., tuple[Array, PyTree]] = _call,
    unembed: Callable[[Any, Array], Array] | None = None,
    embed: Callable[[Any, Array], Array] | None = None,
    cache: Cache = _DEFAULT,
    prefill_chunk: int | None = None,
) -> LanguageModel:
    """A `flax.linen` module as a language model, whose params are the variables that `module.init` gives.

    Args:
      module: any module that `call` calls.
      vocab_size, init_cache, unembed, embed, cache, prefill_chunk: as for `from_nnx`; functions get `apply`, which is
        `module.apply` with the variables, where those of `from_nnx` get the module.
      call: `(apply, tokens, positions, mask, cache, slot) -> (logits [B, N, V], cache)`; default: `apply` called with
        the other five. `apply(..., method="name")` calls a method.

    Raises:
      MarsError: what is given is no linen module. When it is called: logits or a cache of another shape than promised.
    """
    from flax import linen

    if not isinstance(module, linen.Module):
        raise MarsError(f"the module is a {type(module).__name__}: from_linen takes a flax.linen.Module.")
    opened = functools.partial(functools.partial, module.apply)
    return _bridged(
        _Merge(module, opened), vocab_size, init_cache, call, unembed, embed, cache, prefill_chunk
    )


class _Merge:
    """From params to what can be called; equal where the structure that it is made from is."""

    def __init__(self, structure: Any, opened: Callable[[PyTree], Any]):
        self.structure, self.opened = structure, opened

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Merge) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)


@functools.lru_cache
def _bridged(
    merge: _Merge,
    vocab_size: int,
    init_cache: Callable[[int, int], PyTree],
    call: Callable[..., tuple[Array, PyTree]],
    unembed: Callable[[Any, Array], Array] | None,
    embed: Callable[[Any, Array], Array] | None,
    cache: Cache,
    prefill_chunk: int | None,
) -> LanguageModel:
    """Cached, so that equal modules are the same functions and a jitted caller compiles once."""

    def forward(params: PyTree, tokens: Array, visible: Visible, old: PyTree) -> ForwardOutput:
        mask = visible.dense(cache.slots(old))
        given = jnp.maximum(tokens, 0)
        out, new = call(merge.opened(params), given, visible.positions, mask, old, visible.slot)
        _check_shapes(out, old, new, tokens.shape, None if unembed else vocab_size)
        return ForwardOutput(hidden=out, features=(), cache=new)

    def logits(params: PyTree, hidden: Array) -> Array:
        return (hidden if unembed is None else unembed(merge.opened(params), hidden)).astype(jnp.float32)

    def embedded(params: PyTree, tokens: Array) -> Array:
        assert embed is not None
        return embed(merge.opened(params), jnp.maximum(tokens, 0))

    return LanguageModel(
        init_cache=init_cache,
        forward=forward,
        unembed=logits,
        vocab_size=vocab_size,
        embed=None if embed is None else embedded,
        slots=cache.slots,
        commit=cache.commit,
        put=cache.put,
        prefill_chunk=prefill_chunk,
    )


def _check_shapes(out: Any, old: PyTree, new: PyTree, tokens: tuple[int, ...], vocab: int | None) -> None:
    """Raise MarsError where a module gives other shapes than the contract says."""
    wanted = (*tokens, "E" if vocab is None else vocab)
    shape = getattr(out, "shape", ())
    if len(shape) != 3 or shape[:2] != tokens or (vocab is not None and shape[2] != vocab):
        what = "hidden states" if vocab is None else "logits"
        raise MarsError(f"the module gave {what} of shape {shape} for tokens {tokens}: expected {wanted}.")

    def kind(tree: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype) for x in leaves]

    if kind(old) != kind(new):
        raise MarsError(
            "the module gave back a cache of another structure, shape or dtype than it was given: a cache keeps its "
            "own; write rows in the cache's dtype."
        )


def check(model: LanguageModel, params: PyTree, *, tolerance: float = 1e-3) -> None:
    """Try a model against the contract of this module, with a dozen random tokens; takes seconds.

    One forward over all of them is compared with forwards in pieces, with a tree whose nodes share positions and stand
    in other slots, with rows that begin elsewhere, and with a cache full of junk where nothing may look.

    Args:
      model, params: of `from_nnx`, `from_linen`, or a `LanguageModel` of one's own.
      tolerance: the largest difference of two logits that is rounding.

    Raises:
      MarsError: the first promise that is broken.

    >>> from mars_jax.core import fake
    >>> check(fake.hash_model(vocab_size=11), ())
    """
    count, slots = 12, 24
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, (2, count)), jnp.int32)
    zero = jnp.zeros((2,), jnp.int32)

    @jax.jit
    def run(tokens: Array, visible: Visible, cache: PyTree) -> tuple[Array, PyTree]:
        out = model.forward(params, tokens, visible, cache)
        return model.unembed(params, out.hidden), out.cache

    def junk(cache: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.full_like(x, 3), cache)

    def compare(found: Array, wanted: Array, what: str) -> None:
        worst = float(jnp.max(jnp.abs(found - wanted)))
        if not worst <= tolerance:
            raise MarsError(
                f"{what}: logits differ by {worst:.3g} (see the contract in mars_jax.integrations.bridge)."
            )

    whole, filled = run(ids, Visible.causal(zero, count), model.init_cache(2, slots))
    dirty, _ = run(ids, Visible.causal(zero, count), junk(model.init_cache(2, slots)))
    compare(dirty, whole, "the model reads slots that the mask hides, or reads before it writes")
    head, cache = run(ids[:, :8], Visible.causal(zero, 8), junk(model.init_cache(2, slots)))
    tail, _ = run(ids[:, 8:], Visible.causal(zero + 8, 4), cache)
    compare(jnp.concatenate([head, tail], 1), whole, "a text in two pieces is another text than in one")
    swapped, _ = run(ids[::-1], Visible.causal(zero, count), model.init_cache(2, slots))
    compare(swapped[::-1], whole, "a row depends on the others")
    # A tree after 8 tokens: the root, a wrong child, the right child, and the right one's child.
    wrong = (ids[:, 9:10] + 1) % model.vocab_size
    tree = jnp.concatenate([ids[:, 8:9], wrong, ids[:, 9:11]], 1)
    seen = jnp.asarray([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    visible = Visible(
        first=zero + 8,
        positions=jnp.broadcast_to(jnp.asarray([8, 9, 9, 10], jnp.int32), (2, 4)),
        slot=zero + 8,
        seen=jnp.broadcast_to(seen, (2, 4, 4)),
    )
    nodes, grown = run(tree, visible, cache)
    right = jnp.stack([nodes[:, 0], nodes[:, 2], nodes[:, 3]], 1)
    compare(right, whole[:, 8:11], "positions are taken from slots, or the mask is not heeded in a tree")
    path = jnp.broadcast_to(jnp.asarray([0, 2, 3], jnp.int32), (2, 3))
    last, _ = run(ids[:, 11:], Visible.causal(zero + 11, 1), model.commit(grown, zero + 8, path))
    compare(last, whole[:, 11:], "`commit` does not move the rows of an accepted path into a row")
    other = model.put(junk(filled), jnp.asarray([1], jnp.int32), jax.tree.map(lambda x: x[:1], filled))
    again, _ = run(jnp.flip(ids, 0)[:, 11:], Visible.causal(zero + 11, 1), other)
    compare(again[1], whole[0, 11:], "`put` does not replace a row of the cache")


def to_nnx(model: LanguageModel, params: PyTree) -> Any:
    """Params of ours as a `flax.nnx` module, for optimizers, checkpoints and trainers that take one.

    The module holds a `nnx.Param` for each array, and `module(tokens i32[B, N]) -> f32[B, N, V]` gives the logits after
    every token, which have a gradient. `params_of` turns its weights back.

    >>> from mars_jax.models import ModelConfig, init_params, language_model
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> params = init_params(config, jax.random.key(0))
    >>> module = to_nnx(language_model(config), params)
    >>> module(jnp.asarray([[3, 5]], jnp.int32)).shape
    (1, 2, 32)
    >>> jax.tree.structure(params_of(module)) == jax.tree.structure(params)
    True
    """
    return _module_class()(model, params)


@functools.cache
def _module_class() -> type:
    """The class of `to_nnx`'s modules, made when flax is wanted."""
    from flax import nnx

    class OurParams(nnx.Module):
        """Params of a model of `mars_jax` as nnx state; see `bridge.to_nnx`."""

        def __init__(self, model: LanguageModel, params: PyTree):
            leaves, structure = jax.tree.flatten(params)
            self.model, self.structure = model, structure
            self.weights = nnx.List([nnx.Param(x) for x in leaves])

        def params(self) -> PyTree:
            return jax.tree.unflatten(self.structure, [weight[...] for weight in self.weights])

        def __call__(self, tokens: Array) -> Array:
            params, (batch, count) = self.params(), tokens.shape
            visible = Visible.causal(jnp.zeros((batch,), jnp.int32), count)
            out = self.model.forward(params, tokens, visible, self.model.init_cache(batch, count))
            return self.model.unembed(params, out.hidden)

    return OurParams


def params_of(module: Any, state: Mapping[str, Any] | None = None) -> PyTree:
    """The params of a module of `to_nnx`, as the model's functions take them.

    Args:
      module: of `to_nnx`.
      state: weights to take in place of the module's own, such as a trainer's `nnx.state(module, nnx.Param)`. Nothing
        leaves the device, so it may stand in a jitted function.
    """
    if state is None:
        return module.params()
    from flax import nnx

    return nnx.merge(nnx.graphdef(module), state).params()
