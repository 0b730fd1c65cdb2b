"""Adaptive draft length: each step picks the chain length, possibly 0, with the highest estimated tokens per second.

The cost of a step at each length is given or measured. The number of tokens that the step yields is estimated from the
acceptance that the drafter expects, corrected by how recent drafts of the live rows turned out. The choice is made on
the device. Source of the estimate: Leviathan et al. 2211.17192, section 3.3. B batch, n sizes.

Oracle: the drafter of a fixed size, token for token, and a simulation in Python (tests/drafters/test_sized.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core import struct
from mars_jax.core.conditions import Conditions
from mars_jax.core.decoder import Decoder, speculative_decoder
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.rule import Rule
from mars_jax.core.step import propose, step_keys
from mars_jax.core.types import (
    NO_KIND,
    NO_TOKEN,
    DecodeState,
    DraftTree,
    ForwardOutput,
    LanguageModel,
    Params,
    PyTree,
    StepInfo,
    Verdict,
)
from mars_jax.drafters.asked import LoadedDrafter
from mars_jax.drafters.none import none
from mars_jax.utils.errors import MarsError

DECAY = 0.95
"""Factor on the counts after each step with a draft: at batch 1, about the last twenty steps count (some 60 tokens)."""
USUAL_ACCEPTANCE, PRIOR_TOKENS = 0.8, 4.0
"""Acceptance assumed for a drafter that does not estimate its own. The counts start as if `PRIOR_TOKENS` drafted
tokens had been accepted at this rate."""
MARGIN = 1.1
"""Minimum estimated speed of a draft relative to no draft. It exceeds 1 because costs leave out the tokens that a draft
model has to catch up on, and because a batch ends with its slowest row."""
OPTIMISM = 0.1
"""Steps without a draft measure no acceptance. If a draft would pay with this much more acceptance, try one
occasionally."""
PAUSE = 100
"""Steps without a draft before such a trial."""


class SizedParams(NamedTuple):
    """`Params.draft` of a drafter with several sizes."""

    weights: PyTree  # params of the wrapped drafter
    costs: Array | np.ndarray  # f32[n]; cost of a step at each size, in any unit; 0: not measured yet


@struct.dataclass(kw_only=True)
class SizedState:
    """Draft state shared by all sizes, with the counts that each step uses to estimate the acceptance."""

    draft: PyTree  # state of the wrapped drafter
    cached: Array  # i32[B]; committed tokens in the drafter's cache; only used by a drafter with `catch_up`
    accepted: Array  # f32[B]; decayed count of accepted tokens
    expected: Array  # f32[B]; decayed count of tokens that were expected to be accepted
    idle: Array  # i32[B]; steps since the last draft


def usual_sizes(length: int) -> tuple[int, ...]:
    """Return the default sizes: none, the full length, and half of it if that is at least two tokens shorter.

    >>> usual_sizes(5), usual_sizes(3)
    ((0, 3, 5), (0, 3))
    """
    half_length = (length + 1) // 2
    return (0, half_length, length) if half_length + 1 < length else (0, length)


def sized(
    loaded: LoadedDrafter,
    sizes: Sequence[int] | None = None,
    *,
    costs: Sequence[float] | None = None,
    any_rule: bool = False,
) -> LoadedDrafter:
    """Make a drafter that chooses the length of its chain in each step.

    Under `exact`, deterministic drafts produce the same tokens as every fixed size. Sampled output, as under
    `rejection`, has the same distribution, but its tokens depend on the other rows of the batch.

    A step without a draft leaves a draft model's cache behind. The next draft first reads the missing tokens.

    Args:
      loaded: a chain drafter with its weights; its length is the longest size.
      sizes: two to four increasing chain lengths, the first 0; default `usual_sizes` of the drafter's length.
      costs: positive cost of a step at each size and the intended batch size, in any unit, such as seconds or the
        estimate of `mars-jax plan`; default: `generate` and `Session` measure them before the first batch of a shape.
      any_rule: also allow lossy rules, although their completions then depend on the rest of the batch.

    Raises:
      MarsError: the drafter drafts trees, only a single length, or trusted tokens; or sizes or costs are invalid.

    >>> from mars_jax.drafters.ngram import ngram
    >>> adaptive = sized(LoadedDrafter(ngram(8), ()))
    >>> [size.max_depth for size in adaptive.sizes.drafters]
    [0, 4, 8]
    """
    longest = loaded.drafter
    is_chain = longest.num_nodes == longest.max_depth + 1
    if not longest.resizes or not is_chain or longest.trusts:
        raise MarsError(
            f"the drafter '{longest.name}' has no chains of several lengths to choose from: draft with n-grams, a "
            "chain of a model or of an EAGLE head, or replay."
        )
    if sizes is None:
        sizes = usual_sizes(longest.max_depth)
    lengths = tuple(int(size) for size in sizes)
    is_increasing = list(lengths) == sorted(set(lengths))
    if not 2 <= len(lengths) <= 4 or lengths[0] != 0 or not is_increasing or lengths[-1] > longest.max_depth:
        raise MarsError(
            f"sizes are {list(lengths)}: expected two to four lengths that rise from 0 to at most {longest.max_depth}, "
            "the drafter's own."
        )
    if costs is None:
        costs = [0.0] * len(lengths)
    elif len(costs) != len(lengths) or not all(0 < cost < float("inf") for cost in costs):
        raise MarsError(
            f"costs are {list(costs)}: expected a positive number for each of the {len(lengths)} sizes."
        )
    drafts = [none(), *(longest if n == longest.max_depth else longest.resized(n) for n in lengths[1:])]
    drafters = tuple(SizedDrafter(draft, drafts[-1], lengths) for draft in drafts)
    sized_drafter = loaded._replace(
        drafter=dataclasses.replace(drafters[-1], sparse=longest.sparse),
        params=SizedParams(loaded.params, np.empty(0)),
        sizes=Sizes(drafters, lengths, any_rule),
    )
    return with_step_costs(sized_drafter, costs)


def with_step_costs(loaded: LoadedDrafter, costs: Sequence[float]) -> LoadedDrafter:
    """Return the drafter with these costs f32[n]."""
    # A host array exists in every process of a mesh.
    return loaded._replace(params=loaded.params._replace(costs=np.asarray(costs, np.float32)))


def with_size(loaded: LoadedDrafter, index: int) -> LoadedDrafter:
    """Return the drafter with every step fixed to the size at this index, such as 0 for no draft."""
    # A size with an infinite cost is never chosen.
    costs = np.full(len(loaded.params.costs), np.inf)
    costs[index] = 1.0
    return with_step_costs(loaded, costs.tolist())


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that a step chooses from; their drafters share one state."""

    drafters: tuple[Drafter, ...]
    lengths: tuple[int, ...]  # lengths of their chains, increasing from 0
    any_rule: bool  # also allow lossy rules

    def decoder(self, target: LanguageModel, longest: Drafter, verify: Rule) -> SizedDecoder:
        """Return the decoder for a target. Its state is that of the longest draft.

        Raises:
          MarsError: as for `speculative_decoder`, or a lossy rule.
        """
        if not (self.any_rule or verify.lossless):
            raise MarsError(
                f"the drafter '{longest.name}' adapts its draft length, and with the lossy rule {verify.name} a "
                "text would depend on the rest of its batch: draft a fixed size, verify with a lossless rule, or make "
                "the drafter with any_rule=True."
            )
        decoder = speculative_decoder(target, longest, verify)
        return SizedDecoder(
            decoder.target, longest, decoder.rule_structure, decoder.prefill_chunk, sizes=self
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedDecoder(Decoder):
    """A decoder that chooses a draft length in each step; shapes are those of the longest draft.

    The choice is a number on the device, so one program contains all lengths. On a mesh each shard of the rows chooses
    for itself.
    """

    sizes: Sizes

    def _step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        with jax.named_scope("draft"):
            # f32[B]: the drafter's expected acceptance of its next draft; 0 if a sparse drafter finds no draft.
            if self.drafter.sparse:
                # A sparse drafter costs next to nothing, but verifying its padding costs as much as verifying a draft.
                # So draft before choosing a size.
                draft_keys, _ = step_keys(state)
                tree, _ = propose(self.drafter, params, state, Conditions.of(params, state), draft_keys)
                acceptance = _acceptance_of(tree)
            else:
                acceptance = jnp.full(state.length.shape, USUAL_ACCEPTANCE)
            size_index = best_size(params.draft, self.sizes.lengths, state.draft, ~state.done, acceptance)
        decoders = [
            Decoder(self.target, drafter, self.rule_structure, self.prefill_chunk, self.top_log_probs)
            for drafter in self.sizes.drafters
        ]
        info_shapes = jax.eval_shape(decoders[-1]._step, params, state)[1]
        turn = _Turn(size_index, state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info_shapes))
        for size_number, decoder in enumerate(decoders):
            turn = _run_if_chosen(size_number, decoder, params, turn)
        return turn.state, turn.info


class _Turn(NamedTuple):
    """A step that runs at one of several sizes."""

    size: Array  # i32[]; index of the size to run; -1 after the step
    state: DecodeState
    info: StepInfo


def _run_if_chosen(number: int, decoder: Decoder, params: Params, turn: _Turn) -> _Turn:
    """Run a step with the decoder of one size if that size was chosen.

    This is a loop of at most one iteration, because a loop updates its carry in place, whereas XLA copies a cache that
    goes through a `lax.cond`.
    """

    def run(turn: _Turn) -> _Turn:
        state, info = decoder._step(params, turn.state)
        return _Turn(jnp.int32(-1), state, _pad_info(info, turn.info))

    return lax.while_loop(lambda turn: turn.size == number, run, turn)


def _pad_info(info: StepInfo, longest: StepInfo) -> StepInfo:
    """Pad the info of a short draft to the shapes of the longest, as if the missing depths had not been drafted."""
    fill_values = {"kind": NO_KIND} | dict.fromkeys(("emitted", "tokens", "processed_tokens"), NO_TOKEN)

    def pad(path: jax.tree_util.KeyPath, x: Array, like: Array) -> Array:
        pad_widths = [(0, size - length) for length, size in zip(x.shape, like.shape, strict=True)]
        field_name = path[-1].name
        if field_name == "path":  # repeats the last node
            return jnp.pad(x, pad_widths, mode="edge")
        return jnp.pad(x, pad_widths, constant_values=fill_values.get(field_name, 0))

    return jax.tree_util.tree_map_with_path(pad, info, longest)


def best_size(
    params: SizedParams, lengths: Sequence[int], state: SizedState, live: Array, expected: Array
) -> Array:
    """Return i32[], the index of the size with the most tokens per unit of cost.

    The acceptance is the expected one times the ratio of accepted to expected tokens in recent steps.

    Args:
      params: params with costs f32[n].
      lengths: lengths of the n sizes.
      state: state of the rows.
      live: bool[B]; rows that count; if there are none, all rows count.
      expected: f32[B]; the drafter's expected acceptance of each row's next draft; 0: there is no draft.

    >>> import jax
    >>> one, full = jnp.ones((1,), jnp.int32), lambda x: jnp.full((1,), x)
    >>> state = SizedState(draft=(), cached=one, accepted=full(90.0), expected=full(80.0), idle=one)
    >>> costs = [SizedParams((), jnp.asarray(c)) for c in ([1.0, 1.5, 2.0], [1.0, 2.0, 5.0])]
    >>> [int(best_size(c, (0, 2, 5), state, one > 0, full(0.8))) for c in costs]
    [2, 1]
    """
    counted_rows = live | ~jnp.any(live)
    accepted_tokens = jnp.sum(state.accepted, where=counted_rows) + USUAL_ACCEPTANCE * PRIOR_TOKENS
    expected_tokens = jnp.sum(state.expected, where=counted_rows) + USUAL_ACCEPTANCE * PRIOR_TOKENS
    # Without a draft nothing is learned, so after a pause choose as if a little more were accepted.
    is_trial = jnp.any(counted_rows & (state.idle >= PAUSE))
    acceptance = expected * (accepted_tokens / expected_tokens) + jnp.where(is_trial, OPTIMISM, 0.0)
    return _fastest(params, lengths, jnp.where(expected > 0, acceptance, 0.0), counted_rows)


def _fastest(params: SizedParams, lengths: Sequence[int], acceptance: Array, counted_rows: Array) -> Array:
    """Return i32[], the index of the fastest size at an acceptance f32[B], averaged over `counted_rows` bool[B].

    Choose size 0 unless a draft is `MARGIN` times as fast, and the shortest of equally fast sizes.
    """
    # Leviathan et al., equation 1: a chain of K gives 1 + a + ... + a^K tokens. mean_powers[k]: the mean of a^(k + 1).
    depths = jnp.arange(1.0, max(lengths) + 1.0, dtype=jnp.float32)
    mean_powers = jnp.mean(jnp.minimum(acceptance, 1.0)[None] ** depths[:, None], axis=1, where=counted_rows)
    tokens_per_step = jnp.stack([1.0 + jnp.sum(mean_powers[:length]) for length in lengths])
    # Without measurements all sizes are assumed to cost the same.
    speeds = tokens_per_step / jnp.where(params.costs > 0, params.costs, 1.0)
    return jnp.argmax(speeds.at[0].multiply(MARGIN)).astype(jnp.int32)


def _acceptance_of(tree: DraftTree) -> Array:
    """Return f32[B]: a drafter's expected acceptance of its draft; 0 without a draft."""
    acceptance = jnp.full(tree.tokens.shape[:1], USUAL_ACCEPTANCE)
    if tree.expected is not None:
        # A draft with no expectation consists of tokens that a constraint forces.
        acceptance = jnp.where(tree.expected > 0, tree.expected, USUAL_ACCEPTANCE)
    return jnp.where(jnp.any(tree.tokens[:, 1:] != NO_TOKEN, axis=1), acceptance, 0.0)


@dataclasses.dataclass(frozen=True)
class SizedDrafter(Drafter):
    """One of several sizes of a drafter, which all share a `SizedState`."""

    size: Drafter  # drafts this length
    longest: Drafter  # the longest drafter of this kind; all sizes share its state
    lengths: tuple[int, ...]  # chain lengths of all sizes
    # Set only for the drafter that represents all sizes. If a sparse drafter finds no draft, the step chooses size 0,
    # so no other size needs a branch that forwards only the root.
    sparse: bool = False

    @property
    def max_depth(self) -> int:
        return self.size.max_depth

    @property
    def name(self) -> str:
        return f"{self.longest.name}, adaptive length"

    @property
    def vocab_size(self) -> int | None:
        return self.longest.vocab_size

    @property
    def reads(self) -> tuple[int, ...] | None:
        return self.longest.reads

    @property
    def stops(self) -> bool:
        return self.longest.stops

    def init(self, params: Params, tokens: Array, length: Array) -> SizedState:
        cached_length = length
        if self.longest.lags:
            # If no draft is likely to pay, a draft model does not read the prompt: `catch_up` can read it later.
            hopeful_acceptance = jnp.asarray([USUAL_ACCEPTANCE + OPTIMISM])
            draft_pays = _fastest(params.draft, self.lengths, hopeful_acceptance, jnp.asarray([True])) > 0
            cached_length = jnp.where(draft_pays, length, jnp.minimum(length, 2))
        return SizedState(
            draft=self.longest.init(_inner(params), tokens, cached_length),
            # A draft model's cache ends two tokens before the length.
            cached=jnp.maximum(cached_length - 2, 0),
            accepted=jnp.zeros(length.shape, jnp.float32),
            expected=jnp.zeros(length.shape, jnp.float32),
            idle=jnp.zeros(length.shape, jnp.int32),
        )

    def observe(self, params: Params, state: SizedState, *chunk: Any) -> SizedState:
        return dataclasses.replace(state, draft=self.longest.observe(_inner(params), state.draft, *chunk))

    def catch_up(
        self, params: Params, state: SizedState, tokens: Array, cached: Array, length: Array
    ) -> SizedState:
        # The next draft reads the missing tokens. The counts of acceptance stay.
        return dataclasses.replace(state, cached=jnp.minimum(state.cached, cached))

    def propose(self, params: Params, state: SizedState, inputs: DraftInput) -> tuple[DraftTree, SizedState]:
        draft = state.draft
        if self.size.lags:
            draft = self.size.catch_up(_inner(params), draft, inputs.tokens, state.cached, inputs.length)
        tree, draft = self.size.propose(_inner(params), draft, inputs)
        return tree, dataclasses.replace(state, draft=draft)

    def update(
        self,
        params: Params,
        state: SizedState,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> SizedState:
        if self.max_depth == 0:
            draft = state.draft
            if not self.longest.lags:
                # The target's features are only available in this step.
                draft = self.longest.update(_inner(params), draft, tree, verdict, output, length)
            return dataclasses.replace(state, draft=draft, idle=state.idle + 1)
        # Tokens after the first rejection are not tested. Padding at the end of a chain counts as rejected.
        num_tested = jnp.minimum(verdict.num_accepted + 1, self.max_depth)
        expected_tokens = _acceptance_of(tree) * num_tested.astype(jnp.float32)
        # After steps without a draft, older counts count half. A sparse drafter often finds no draft for a few steps.
        decay = jnp.where(state.idle >= (PAUSE if self.size.sparse else 1), DECAY / 2, DECAY)
        return SizedState(
            draft=self.size.update(_inner(params), state.draft, tree, verdict, output, length),
            # The new length is length + num_accepted + 1, and a draft model's cache ends two tokens before it.
            cached=length + verdict.num_accepted - 1,
            accepted=decay * state.accepted + verdict.num_accepted.astype(jnp.float32),
            expected=decay * state.expected + expected_tokens,
            idle=jnp.zeros_like(state.idle),
        )


def _inner(params: Params) -> Params:
    """Return the params of the wrapped drafter."""
    return params._replace(draft=params.draft.weights)
