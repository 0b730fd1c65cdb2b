"""Self-speculation: the target drafts for itself, with 8-bit weights and only the first and last rows of its KV cache.

Sources: MagicDec 2408.11049 (a draft with a sliding window), QuantSpec 2502.10424 (the quantised target as draft),
StreamingLLM 2309.17453 (attention sinks). B batch, C kept slots, D depth, S slots of the target's cache. Tested against
the target itself with its whole cache and an attention mask (tests/contrib/test_self_draft.py).

The drafter has no long KV cache of its own. After every step it copies the C rows that it can attend to from the
target's cache. So prompts need no second prefill, and drafting a token always reads C rows, regardless of the context
length. The 8-bit weights are a second copy of the target's weights, unless the target is already in 8 bits, in which
case the arrays are shared.

Invariant: slot c of the draft cache contains the keys and values of position c if c < `SINKS`, and of position c +
`skipped` otherwise, with `skipped = max(length - 1 - C, 0)`. Slots before `length - 1 - skipped` are valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.given import check_draft_model
from mars_jax.core.pick import pick
from mars_jax.core.types import DraftTree, ForwardOutput, LanguageModel, Params, PyTree, Verdict, Visible
from mars_jax.drafters import DraftInput, LoadedDrafter, last_token, register
from mars_jax.drafters.asked import Asked
from mars_jax.drafters.grow import Growth, Level, grow
from mars_jax.drafters.tree_shapes import ShapedDrafter
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Quantized, bits_of, quantize
from mars_jax.models.weights import Weight, build_rows, get, leaves
from mars_jax.utils.errors import MarsError

SINKS, WINDOW = 4, 256
"""Number of tokens that stay visible at the start of the context (attention sinks), and number of tokens at its end."""


@dataclasses.dataclass(frozen=True)
class SelfDraft(ShapedDrafter):
    """The target itself, with 8-bit weights and attention to only part of the context.

    `Params.draft` contains weights with the target's structure, such as its quantised weights.

    Raises:
      MarsError: see `DraftModel`.

    >>> from mars_jax.core.fake import hash_model
    >>> self_draft(hash_model(vocab_size=11), tree=(2, 2)).num_nodes
    7
    """

    model: LanguageModel  # target without sliding windows; all leaves of its cache are [B, S, ...]
    # Length of the chain; ignored if `tree` is set.
    num_draft_tokens: int = dataclasses.field(default=5, compare=False)
    # Number of the most recent tokens that the drafter attends to, in addition to the first `SINKS` tokens.
    window: int = dataclasses.field(default=WINDOW, kw_only=True)

    reads = ()

    def __post_init__(self):
        check_draft_model(self.model)
        self._set_shape(self.num_draft_tokens, self.model.vocab_size)

    @property
    def kind(self) -> str:
        return "self"

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def _num_kept(self) -> int:
        """C, the number of slots that are copied from the target's cache."""
        return SINKS + self.window

    def init(self, params: Params, tokens: Array, length: Array) -> PyTree:
        return self.model.init_cache(tokens.shape[0], self._num_kept + 1 + self.shape.rows)

    def _skipped(self, length: Array) -> Array:
        return jnp.maximum(length - 1 - self._num_kept, 0)

    def _copied(
        self, cache: PyTree, target_cache: PyTree, length: Array, slot: Callable[[Array], Array]
    ) -> PyTree:
        """Copy the rows visible at `length` i32[B] from the target's cache, where position p is in slot `slot(p)`."""
        num_kept = self._num_kept
        # A sink's position equals its slot. In the slots of the window, the position exceeds the slot by `skipped`.
        slots = jnp.arange(num_kept, dtype=jnp.int32)[None]
        position = jnp.where(slots < SINKS, slots, slots + self._skipped(length)[:, None])
        read = jax.vmap(lambda x, index: x.at[index].get(mode="clip"))
        return jax.tree.map(lambda x, y: x.at[:, :num_kept].set(read(y, slot(position))), cache, target_cache)

    def observe(
        self, params: Params, state: PyTree, tokens: Array, first: Array, length: Array, output: ForwardOutput
    ) -> PyTree:
        return self._copied(state, output.cache, length, lambda position: position)

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        skipped = self._skipped(inputs.length)

        def forward(tokens: Array, visible: Visible, cache: PyTree) -> tuple[Array, PyTree]:
            # Keys are rotated by their absolute positions, so shift only the slots.
            shifted = dataclasses.replace(visible, first=visible.first - skipped, slot=visible.slot - skipped)
            output = self.model.forward(params.draft, tokens, shifted, cache)
            return self.model.unembed(params.draft, output.hidden), output.cache

        def extend(cache: PyTree, level: Level) -> tuple[Array, PyTree]:
            return forward(level.tokens, level.visible, cache)

        root = last_token(inputs)
        logits, cache = forward(root, Visible.causal(inputs.length - 1, 1), state)
        growth = Growth(logits=logits, carry=cache, extend=extend, first=inputs.length)
        tree, _, cache = grow(
            self.shape, self.sample, growth, root, inputs.keys, inputs.controls, inputs.guide
        )
        return tree, cache

    def update(
        self,
        params: Params,
        state: PyTree,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> PyTree:
        root_slot = (length - 1)[:, None]

        def slot(position: Array) -> Array:
            # The rows of the tree are still in node order, starting at `root_slot`. The target moves the rows of the
            # accepted path only after this update.
            path_index = jnp.clip(position - root_slot, 0, self.shape.depth)
            return jnp.where(position < root_slot, position, root_slot + pick(verdict.path, path_index))

        return self._copied(state, output.cache, length + verdict.num_accepted + 1, slot)


self_draft = SelfDraft


def load_self(asked: Asked) -> LoadedDrafter:
    """Make a `self_draft` drafter, with the target's matrices quantised to 8 bits.

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


register("self", SelfDraft, load_self, paper="2408.11049, 2502.10424")
