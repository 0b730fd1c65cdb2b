"""The target as its own draft: its weights in 8 bits, and of its cache the first tokens and the last ones alone.

Sources: MagicDec 2408.11049 (a draft that sees a window), QuantSpec 2502.10424 (one that is the target in few bits),
StreamingLLM 2309.17453 (the first tokens stay). B batch, C slots that are kept, D depth, S slots of the target's cache.
Oracle: the target itself over its whole cache, under a mask (tests/contrib/test_self_draft.py).

The draft has no long cache: after every step it copies the C rows that it sees from the target's. So no prompt is read
twice, and a drafted token reads C rows however long the text is. Weights in 8 bits are a copy beside the target's,
unless those are in 8 bits already: then they are the same arrays.

The invariant: slot c < `SINKS` of the draft's cache has the row of position c, and each later one that of position
c + `skipped`, where `skipped = max(length - 1 - C, 0)`; valid are the slots before `length - 1 - skipped`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.drafter import STOPS, Drafter, DraftInput, Reads
from mars_jax.core.errors import MarsError
from mars_jax.core.pick import pick
from mars_jax.core.tree import last_token
from mars_jax.core.types import (
    DraftTree,
    ForwardOutput,
    LanguageModel,
    Params,
    PyTree,
    Verdict,
    Visible,
)
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.grow import Growth, Level, grow
from mars_jax.drafters.tree_shapes import Dynamic, Shape, describe, shape_of
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Quantized, bits_of, quantize
from mars_jax.models.weights import Weight, build_rows, get, leaves

SINKS, WINDOW = 4, 256
"""Tokens that stay visible at the beginning of a text, as in StreamingLLM, and at its end."""


def self_draft(
    model: LanguageModel,
    num_draft_tokens: int = 5,
    *,
    tree: Sequence[int] | Dynamic | None = None,
    sample: bool = False,
    window: int = WINDOW,
) -> Drafter:
    """Draft with the target; `Params.draft` are weights of the target's structure, such as those in 8 bits.

    Args:
      model: the target, without sliding windows of its own, and with a cache whose leaves are [B, S, ...].
      num_draft_tokens, tree, sample: as in `drafters.language_model`.
      window: tokens at the end of a text that the draft sees beside the first `SINKS`.

    Raises:
      MarsError: as `drafters.language_model`.

    >>> from mars_jax.core.fake import hash_model
    >>> self_draft(hash_model(vocab_size=11), tree=(2, 2)).num_nodes
    7
    """
    return _self_draft(model, shape_of(num_draft_tokens, tree, model.vocab_size), sample, window)


@functools.lru_cache
def _self_draft(model: LanguageModel, shape: Shape, sample: bool, window: int) -> Drafter:
    kept = SINKS + window

    def init(params: Params, tokens: Array, length: Array) -> PyTree:
        return model.init_cache(tokens.shape[0], kept + 1 + shape.rows)

    def skipped(length: Array) -> Array:
        return jnp.maximum(length - 1 - kept, 0)

    def copied(cache: PyTree, of: PyTree, length: Array, slot: Callable[[Array], Array]) -> PyTree:
        """The draft's cache for texts of `length`, from the target's, which has position p in slot `slot(p)`."""
        place = jnp.arange(kept, dtype=jnp.int32)[None]
        position = jnp.where(place < SINKS, place, place + skipped(length)[:, None])
        rows = jax.vmap(lambda x, at: x.at[at].get(mode="clip"))
        return jax.tree.map(lambda x, y: x.at[:, :kept].set(rows(y, slot(position))), cache, of)

    def observe(
        params: Params, state: PyTree, tokens: Array, first: Array, length: Array, output: ForwardOutput
    ) -> PyTree:
        return copied(state, output.cache, length, lambda position: position)

    def propose(params: Params, state: PyTree, given: DraftInput) -> tuple[DraftTree, PyTree]:
        skip = skipped(given.length)

        def forward(tokens: Array, visible: Visible, cache: PyTree) -> tuple[Array, PyTree]:
            # Keys are rotated by their positions, so only the slots move.
            here = dataclasses.replace(visible, first=visible.first - skip, slot=visible.slot - skip)
            output = model.forward(params.draft, tokens, here, cache)
            return model.unembed(params.draft, output.hidden), output.cache

        def extend(cache: PyTree, level: Level) -> tuple[Array, PyTree]:
            return forward(level.tokens, level.visible, cache)

        root = last_token(given)
        logits, cache = forward(root, Visible.causal(given.length - 1, 1), state)
        growth = Growth(logits=logits, carry=cache, extend=extend, first=given.length)
        tree, _, cache = grow(shape, sample, growth, root, given.keys, given.controls, given.guide)
        return tree, cache

    def update(
        params: Params,
        state: PyTree,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> PyTree:
        first = (length - 1)[:, None]

        def slot(position: Array) -> Array:
            # The target has the rows of its nodes from `first` on, and moves those of the path only afterwards.
            step = jnp.clip(position - first, 0, shape.depth)
            return jnp.where(position < first, position, first + pick(verdict.path, step))

        return copied(state, output.cache, length + verdict.num_accepted + 1, slot)

    return Drafter(
        init=init,
        propose=propose,
        update=update,
        reads=Reads((), observe),
        num_nodes=shape.num_nodes,
        max_depth=shape.depth,
        vocab_size=model.vocab_size,
        traits=(STOPS,),
        name=f"self({describe(shape, sample)})",
    )


def load_self(asked: Asked) -> LoadedDrafter:
    """`self_draft` of the target, its matrices in 8 bits.

    Raises:
      MarsError: the target has sliding windows, or no config.
    """
    target = asked.target
    config = target.config
    if not isinstance(config, ModelConfig) or any(config.windows):
        raise MarsError(
            f"'{target.name}' has {'sliding windows' if isinstance(config, ModelConfig) else 'no config'}, and the "
            "drafter 'self' is for transformers of full attention: draft with ngram."
        )

    def in_8_bits(row: Weight) -> PyTree:
        weight = get(target.params, row.path)
        return quantize(weight) if bits_of(row, 8) and not isinstance(weight, Quantized) else weight

    drafter = self_draft(target.model, asked.chain, **asked.shape)
    return LoadedDrafter(drafter, build_rows(leaves(config), in_8_bits))
