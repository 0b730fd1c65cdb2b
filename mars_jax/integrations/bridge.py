"""Adapters that use Flax modules as language models, and mars-jax params as nnx state.

A module is used unchanged: one function, `call`, adapts its inputs and outputs. **The contract** of a call `(tokens
i32[B, N], positions i32[B, N], mask bool[B, N, S], cache, slot i32[B]) -> (logits, cache)`:

- Writes precede reads: the keys and values of the N tokens go into slots `slot[b] .. slot[b] + N - 1` of the cache.
  Then each token attends to exactly the slots of the cache that the mask allows, including its own.
- A slot is not a position: rotary embeddings use `positions`. Tree nodes at the same depth have the same position.
- Padding is clipped: a negative token id is passed as 0, and its output is never used.
- Rows are independent, and the call is pure: it does not change its input cache.
- Functions are reused: adapting a module twice with the same functions returns the same model, which is not compiled
  again. Evaluating a lambda expression twice creates two different functions.

`check` tests a model against the contract. Tested against transformers' logits by adapting our own transformer
(tests/integrations/test_bridge.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core.types import ForwardOutput, LanguageModel, PyTree, Visible
from mars_jax.utils.errors import MarsError

__all__ = ["Cache", "check", "from_linen", "from_nnx", "params_of", "to_nnx"]


@dataclasses.dataclass(frozen=True)
class Cache:
    """Access functions for a cache whose leaves do not have the shape [B, S, ...]; see `LanguageModel`.

    Args:
      slots: function cache -> S, the number of slots.
      commit: (cache, start i32[B], path i32[B, D + 1]) -> cache; moves the entries of an accepted path into consecutive
        slots. Called only for draft trees.
      put: (cache, rows i32[b], new) -> cache; replaces rows of the batch. By default, the first axis of every leaf is
        B.
    """

    slots: Callable[[PyTree], int] = kv_cache.slots
    commit: Callable[[PyTree, Array, Array], PyTree] = kv_cache.commit_path
    put: Callable[[PyTree, Array, PyTree], PyTree] = kv_cache.put_rows


_DEFAULT = Cache()


def _call(module: Callable[..., Any], *arguments: PyTree) -> tuple[Array, PyTree]:
    return module(*arguments)


def from_nnx(
    module: nnx.Module,
    *,
    vocab_size: int,
    init_cache: Callable[[int, int], PyTree],
    call: Callable[..., tuple[Array, PyTree]] = _call,
    unembed: Callable[[Any, Array], Array] | None = None,
    embed: Callable[[Any, Array], Array] | None = None,
    cache: Cache = _DEFAULT,
    prefill_chunk: int | None = None,
) -> tuple[LanguageModel, PyTree]:
    """Return a `flax.nnx` module as a language model, and its state as params.

    Args:
      module: any module that `call` supports. This function splits it into structure and state. After training, pass
        `nnx.state(module)` as params; if the trainer has only params, update the module with `nnx.update` first.
      vocab_size: V.
      init_cache: function (batch, slots) -> cache, a pytree of arrays.
      call: `(module, tokens, positions, mask, cache, slot) -> (logits [B, N, V], cache)`, with the contract above;
        default: call the module with the other five arguments.
      unembed: `(module, hidden [B, N, E]) -> logits`, if `call` returns hidden states instead of logits. Then prefill
        computes no logits, and rules and drafters can read the hidden states.
      embed: `(module, tokens i32[B, N]) -> [B, N, E]`, for drafters that share the target's embedding.
      cache: access functions of a custom cache.
      prefill_chunk: prompt tokens per forward pass.

    Returns:
      (model, params), for `speculative_decoder`, `drafters.language_model` and `Pretrained.from_parts`.

    Raises:
      MarsError: `module` is not an nnx module. Also raised when the model is called, if its logits or cache have the
        wrong shape.
    """
    if not isinstance(module, nnx.Module):
        raise MarsError(f"the module is a {type(module).__name__}: from_nnx takes a flax.nnx.Module.")
    graph_def, state = nnx.split(module)
    return _bridged(graph_def, vocab_size, init_cache, call, unembed, embed, cache, prefill_chunk), state


def from_linen(
    module: linen.Module,
    *,
    vocab_size: int,
    init_cache: Callable[[int, int], PyTree],
    call: Callable[..., tuple[Array, PyTree]] = _call,
    unembed: Callable[[Any, Array], Array] | None = None,
    embed: Callable[[Any, Array], Array] | None = None,
    cache: Cache = _DEFAULT,
    prefill_chunk: int | None = None,
) -> LanguageModel:
    """Return a `flax.linen` module as a language model, whose params are the variables that `module.init` returns.

    Args:
      module: any module that `call` supports.
      vocab_size, init_cache, unembed, embed, cache, prefill_chunk: as for `from_nnx`, except that the functions receive
        `apply`, which is `module.apply` bound to the variables, instead of the module.
      call: `(apply, tokens, positions, mask, cache, slot) -> (logits [B, N, V], cache)`; default: call `apply` with the
        other five arguments. `apply(..., method="name")` calls a method.

    Raises:
      MarsError: `module` is not a linen module. Also raised when the model is called, if its logits or cache have the
        wrong shape.
    """
    if not isinstance(module, linen.Module):
        raise MarsError(f"the module is a {type(module).__name__}: from_linen takes a flax.linen.Module.")
    return _bridged(module, vocab_size, init_cache, call, unembed, embed, cache, prefill_chunk)


@functools.lru_cache
def _bridged(
    structure: linen.Module | nnx.GraphDef,
    vocab_size: int,
    init_cache: Callable[[int, int], PyTree],
    call: Callable[..., tuple[Array, PyTree]],
    unembed: Callable[[Any, Array], Array] | None,
    embed: Callable[[Any, Array], Array] | None,
    cache: Cache,
    prefill_chunk: int | None,
) -> LanguageModel:
    """Return the language model. Results are cached, so that equal modules share functions and compile only once."""

    def bound(params: PyTree) -> Any:
        """Return the module with its params, as a callable."""
        if isinstance(structure, linen.Module):
            return functools.partial(structure.apply, params)
        return nnx.merge(structure, params)

    def forward(params: PyTree, tokens: Array, visible: Visible, previous_cache: PyTree) -> ForwardOutput:
        mask = visible.dense(cache.slots(previous_cache))
        ids = jnp.maximum(tokens, 0)
        output, next_cache = call(bound(params), ids, visible.positions, mask, previous_cache, visible.slot)
        _check_shapes(output, previous_cache, next_cache, tokens.shape, None if unembed else vocab_size)
        return ForwardOutput(hidden=output, features=(), cache=next_cache)

    def logits(params: PyTree, hidden: Array) -> Array:
        if unembed is not None:
            hidden = unembed(bound(params), hidden)
        return hidden.astype(jnp.float32)

    def embedded(params: PyTree, tokens: Array) -> Array:
        assert embed is not None
        return embed(bound(params), jnp.maximum(tokens, 0))

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


def _check_shapes(
    output: object, old_cache: PyTree, new_cache: PyTree, tokens: tuple[int, ...], vocab: int | None
) -> None:
    """Raise MarsError if a module returns shapes or dtypes that violate the contract.

    Args:
      output: logits, or hidden states if `vocab` is None.
      old_cache, new_cache: the cache before and after the call.
      tokens: shape of the tokens.
      vocab: V, or None.
    """
    output_name, last_axis = ("hidden states", "E") if vocab is None else ("logits", vocab)
    shape = getattr(output, "shape", ())
    if len(shape) != 3 or shape[:2] != tokens or (vocab is not None and shape[2] != vocab):
        raise MarsError(
            f"the module returned {output_name} of shape {shape} for tokens {tokens}: expected {(*tokens, last_axis)}."
        )
    same_structure = jax.tree.structure(old_cache) == jax.tree.structure(new_cache)
    old, new = ([(x.shape, x.dtype) for x in jax.tree.leaves(cache)] for cache in (old_cache, new_cache))
    if not same_structure or old != new:
        raise MarsError(
            "the module returned a cache of another structure, shape or dtype than it received: keep all three, and "
            "write rows in the cache's dtype."
        )


def check(model: LanguageModel, params: PyTree, *, tolerance: float = 1e-3) -> None:
    """Test a model against the contract of this module with a dozen random tokens, in a few seconds.

    The reference is one forward pass over all tokens. It is compared with passes over parts of the tokens, over a tree
    in which two nodes share a position, with rows swapped or replaced, and with junk in all masked slots of the cache.

    Args:
      model, params: from `from_nnx` or `from_linen`, or a user's `LanguageModel`.
      tolerance: largest difference between two logits that counts as a rounding error.

    Raises:
      MarsError: the contract is violated; the message describes the first violation.

    >>> from mars_jax.core import fake
    >>> check(fake.hash_model(vocab_size=11), ())
    """
    count, slots = 12, 24
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, (2, count)), jnp.int32)
    start = jnp.zeros((2,), jnp.int32)

    @jax.jit
    def run(tokens: Array, visible: Visible, cache: PyTree) -> tuple[Array, PyTree]:
        output = model.forward(params, tokens, visible, cache)
        return model.unembed(params, output.hidden), output.cache

    def junk(cache: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.full_like(x, 3), cache)

    def compare(logits: Array, expected: Array, problem: str) -> None:
        max_difference = float(jnp.max(jnp.abs(logits - expected)))
        # Negated, so that NaN fails as well.
        if not max_difference <= tolerance:
            raise MarsError(
                f"{problem}: logits differ by {max_difference:.3g} (see the contract in mars_jax.integrations.bridge)."
            )

    # The reference: all tokens in one forward pass, with a fresh cache.
    full_logits, full_cache = run(ids, Visible.causal(start, count), model.init_cache(2, slots))
    # All tokens at once, with a cache full of junk.
    junk_logits, _ = run(ids, Visible.causal(start, count), junk(model.init_cache(2, slots)))
    compare(junk_logits, full_logits, "the model reads slots that the mask hides, or reads before it writes")
    # The first 8 tokens, then the last 4. `cache` holds the first 8 for the tests of trees.
    head_logits, cache = run(ids[:, :8], Visible.causal(start, 8), junk(model.init_cache(2, slots)))
    tail_logits, _ = run(ids[:, 8:], Visible.causal(start + 8, 4), cache)
    compare(jnp.concatenate([head_logits, tail_logits], 1), full_logits, "two pieces give other logits")
    # The two rows in reverse order.
    swapped_logits, _ = run(ids[::-1], Visible.causal(start, count), model.init_cache(2, slots))
    compare(swapped_logits[::-1], full_logits, "a row depends on the others")
    # A tree after 8 tokens: the root, a wrong child, the right child, and a child of the right one. The nodes are in
    # slots 8 to 11; the two siblings have the same position.
    wrong_token = (ids[:, 9:10] + 1) % model.vocab_size
    tree_tokens = jnp.concatenate([ids[:, 8:9], wrong_token, ids[:, 9:11]], 1)
    tree_mask = jnp.asarray([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    visible = Visible(
        first=start + 8,
        positions=jnp.broadcast_to(jnp.asarray([8, 9, 9, 10], jnp.int32), (2, 4)),
        slot=start + 8,
        seen=jnp.broadcast_to(tree_mask, (2, 4, 4)),
    )
    node_logits, tree_cache = run(tree_tokens, visible, cache)
    # The path without the wrong child consists of tokens 8 to 10 of the text.
    path_nodes = jnp.asarray([0, 2, 3], jnp.int32)
    tree_problem = "positions are taken from slots, or the mask of a tree is ignored"
    compare(node_logits[:, path_nodes], full_logits[:, 8:11], tree_problem)
    committed_cache = model.commit(tree_cache, start + 8, jnp.broadcast_to(path_nodes, (2, 3)))
    last_logits, _ = run(ids[:, 11:], Visible.causal(start + 11, 1), committed_cache)
    compare(last_logits, full_logits[:, 11:], "`commit` does not move the entries of an accepted path")
    # Copy row 0 of the cache to row 1, and decode the last token of row 0 in row 1.
    first_row = jax.tree.map(lambda x: x[:1], full_cache)
    put_cache = model.put(junk(full_cache), jnp.asarray([1], jnp.int32), first_row)
    put_logits, _ = run(jnp.flip(ids, 0)[:, 11:], Visible.causal(start + 11, 1), put_cache)
    compare(put_logits[1], full_logits[0, 11:], "`put` does not replace a row of the cache")


class OurParams(nnx.Module):
    """Params of a model of `mars_jax` as nnx state; see `to_nnx`."""

    def __init__(self, model: LanguageModel, params: PyTree):
        leaves, structure = jax.tree.flatten(params)
        self.model, self.structure = model, structure
        self.weights = nnx.List([nnx.Param(x) for x in leaves])

    def params(self) -> PyTree:
        """Return the params in the structure that the model's functions expect."""
        return jax.tree.unflatten(self.structure, [weight[...] for weight in self.weights])

    def __call__(self, tokens: Array) -> Array:
        """Return the logits after every token: i32[B, N] -> f32[B, N, V]."""
        params, (batch, num_tokens) = self.params(), tokens.shape
        visible = Visible.causal(jnp.zeros((batch,), jnp.int32), num_tokens)
        output = self.model.forward(params, tokens, visible, self.model.init_cache(batch, num_tokens))
        return self.model.unembed(params, output.hidden)


def to_nnx(model: LanguageModel, params: PyTree) -> OurParams:
    """Return params as a `flax.nnx` module, for optimizers, checkpoints and trainers that expect such a module.

    The module has an `nnx.Param` for each array. `module(tokens i32[B, N]) -> f32[B, N, V]` returns the logits after
    every token and is differentiable. `params_of` converts its weights back.

    >>> from mars_jax.models import ModelConfig, init_params, language_model
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> params = init_params(config, jax.random.key(0))
    >>> module = to_nnx(language_model(config), params)
    >>> module(jnp.asarray([[3, 5]], jnp.int32)).shape
    (1, 2, 32)
    >>> jax.tree.structure(params_of(module)) == jax.tree.structure(params)
    True
    """
    return OurParams(model, params)


def params_of(module: OurParams, state: Mapping[str, Any] | None = None) -> PyTree:
    """Return the params of a module from `to_nnx`, in the structure that the model's functions expect.

    Args:
      module: from `to_nnx`.
      state: weights to use instead of the module's, such as a trainer's `nnx.state(module, nnx.Param)`. All arrays stay
        on the device, so the call may be part of a jitted function.
    """
    if state is not None:
        module = nnx.merge(nnx.graphdef(module), state)
    return module.params()
