"""Adaptive draft length: each step picks the chain length, possibly 0, with the highest estimated tokens per second.

The cost of a step at each length is given or measured. The number of tokens that the step yields is estimated from the
acceptance that the drafter expects, corrected by how recent drafts of the live rows turned out. The choice is made on
the device. Source of the estimate: Leviathan et al. 2211.17192, section 3.3. B batch, n lengths.

Oracle: the drafter of a fixed length, token for token, and a simulation in Python (tests/drafters/test_sized.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.conditions import Conditions
from mars_jax.core.decoder import Decoder, speculative_decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.rule import Rule, structure
from mars_jax.core.step import propose, step_keys
from mars_jax.core.types import NO_TOKEN, DecodeState, LanguageModel, Params, StepInfo
from mars_jax.drafters.asked import LoadedDrafter
from mars_jax.drafters.skipping import SizedParams, Skipping, SkippingState
from mars_jax.utils.errors import MarsError

DECAY = 0.95
"""Factor on the counts after each step with a draft: at batch 1, about the last twenty steps count (some 60 tokens)."""
USUAL_ACCEPTANCE, PRIOR_TOKENS = 0.7, 3.0
"""Acceptance assumed for a drafter that does not estimate its own. The counts start as if `PRIOR_TOKENS` drafted
tokens had been accepted at this rate. The rate is moderate, so that a short answer is not slowed down by trying a draft
that is expensive compared with a step."""
MARGIN = 1.1
"""Minimum estimated speed of a draft relative to no draft. It exceeds 1 because costs leave out the tokens that a draft
model has to catch up on, and because a batch ends with its slowest row."""
OPTIMISM = 0.1
"""Steps without a draft measure no acceptance. If a draft would pay with this much more acceptance, try one
occasionally."""
PAUSE = 32
"""Steps without a draft before such a trial. A rejected draft takes about as long as one or two of them."""


class Counts(NamedTuple):
    """Counts of each row, from which a step estimates the acceptance; stored in `SkippingState.counts`."""

    accepted: Array  # f32[B]; decayed count of accepted tokens
    expected: Array  # f32[B]; decayed count of tokens that were expected to be accepted
    idle: Array  # i32[B]; steps since the last draft

    def after(self, length: Array, num_accepted: Array, expected: Array, patience: int) -> Counts:
        """Return the counts after a step with a draft of `length` i32[] tokens; `expected` is as for `best_size`.

        After `patience` or more steps without a draft, older counts weigh half.
        """
        # Tokens after the first rejection are not tested. Padding at the end of a chain counts as rejected.
        num_tested = jnp.minimum(num_accepted + 1, length).astype(jnp.float32)
        decay = jnp.where(length > 0, jnp.where(self.idle >= patience, DECAY / 2, DECAY), 1.0)
        return Counts(
            decay * self.accepted + num_accepted.astype(jnp.float32),
            decay * self.expected + expected * num_tested,
            jnp.where(length > 0, 0, self.idle + 1),
        )


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

    A step without a draft leaves the drafter's cache behind. The next draft first reads the missing tokens.

    Args:
      loaded: a chain drafter with its weights; its length is the longest size.
      sizes: two to four increasing chain lengths, the first 0; default `usual_sizes` of the drafter's length.
      costs: positive cost of a step at each size and the intended batch size, in any unit, such as seconds or the
        estimate of `mars-jax plan`; default: `generate` and `Session` measure them before the first batch of a shape.
      any_rule: also allow lossy rules, although their completions then depend on the rest of the batch.

    Raises:
      MarsError: the drafter drafts trees, only a single length, or trusted tokens, or has both `catch_up` and `reads`;
        or sizes or costs are invalid.

    >>> from mars_jax.drafters.ngram import ngram
    >>> adaptive = sized(LoadedDrafter(ngram(8), ()))
    >>> adaptive.sizes.lengths
    (0, 4, 8)
    """
    longest = loaded.drafter
    # A step without a draft can postpone reading tokens or reading the target's outputs, but not both.
    reads_both = longest.lags and longest.reads is not None
    if not longest.resizes or longest.trusts or reads_both or longest.num_nodes != longest.max_depth + 1:
        raise MarsError(
            f"the drafter '{longest.name}' has no chains of several lengths to choose from: draft with n-grams, "
            "replay, or a chain of a model, an EAGLE head or an MTP module."
        )
    if sizes is None:
        sizes = usual_sizes(longest.max_depth)
    lengths = tuple(map(int, sizes))
    is_increasing = lengths[:1] == (0,) and list(lengths) == sorted(set(lengths))
    if not (is_increasing and 2 <= len(lengths) <= 4 and lengths[-1] <= longest.max_depth):
        raise MarsError(
            f"sizes are {list(lengths)}: expected two to four lengths that rise from 0 to at most {longest.max_depth}, "
            "the drafter's own."
        )
    if costs is None:
        costs = [0.0] * len(lengths)
    elif len(costs) != len(lengths) or not all(0 < cost < np.inf for cost in costs):
        raise MarsError(f"costs are {list(costs)}: expected {len(lengths)} positive numbers.")
    longest = longest.resized(lengths[-1])
    drafter = SizedDrafter(longest, longest, lengths=lengths, any_rule=any_rule, sparse=longest.sparse)
    # A host array exists in every process of a mesh.
    params = SizedParams(loaded.params, np.asarray(costs, np.float32))
    return loaded._replace(drafter=drafter, params=params, sizes=drafter)


def with_step_costs(loaded: LoadedDrafter, costs: Sequence[float] | np.ndarray) -> LoadedDrafter:
    """Return the drafter with these costs f32[n]."""
    # A host array exists in every process of a mesh.
    return loaded._replace(params=loaded.params._replace(costs=np.asarray(costs, np.float32)))


def with_size(loaded: LoadedDrafter, index: int) -> LoadedDrafter:
    """Return the drafter with every step fixed to the size at this index, such as 0 for no draft."""
    # A size with an infinite cost is never chosen.
    return with_step_costs(loaded, np.where(np.arange(len(loaded.params.costs)) == index, 1.0, np.inf))


@dataclasses.dataclass(frozen=True)
class SizedDrafter(Skipping):
    """A drafter whose decoder chooses among several lengths; by itself it drafts the longest."""

    lengths: tuple[int, ...] = ()  # chain lengths, increasing from 0
    any_rule: bool = False  # also allow lossy rules
    sparse: bool = False

    @property
    def name(self) -> str:
        return f"{self.longest.name}, adaptive length"

    def decoder(self, target: LanguageModel, verify: Rule) -> Decoder:
        """Return the decoder for a target.

        Raises:
          MarsError: as for `speculative_decoder`, or a lossy rule.
        """
        if not (self.any_rule or verify.lossless):
            raise MarsError(
                f"the drafter '{self.name}' adapts its draft length, and with the lossy rule {verify.name} a text "
                "would depend on the rest of its batch: draft a fixed size, verify with a lossless rule, or make the "
                "drafter with any_rule=True."
            )
        target = speculative_decoder(target, self, verify).target
        return SizedDecoder(target, dataclasses.replace(self, target=target), structure(verify))

    def init(self, params: Params, tokens: Array, length: Array) -> SkippingState:
        zeros, cached_length = jnp.zeros(length.shape, jnp.float32), length
        counts = Counts(zeros, zeros, jnp.zeros_like(length))
        if self.longest.lags:
            # If not even a trial would draft, a draft model does not read the prompt: `catch_up` can read it later.
            trial_counts = counts._replace(idle=counts.idle + PAUSE)
            size = best_size(params.draft, self.lengths, trial_counts, length > 0, zeros + USUAL_ACCEPTANCE)
            cached_length = jnp.where(size > 0, length, jnp.minimum(length, 2))
        return dataclasses.replace(super().init(params, tokens, cached_length), counts=counts)


@dataclasses.dataclass(frozen=True)
class SizedDecoder(Decoder):
    """A decoder that chooses a draft length in each step; shapes are those of the longest draft.

    The choice is a number on the device, so one program contains all lengths. On a mesh, each shard of the rows
    makes its own choice.
    """

    drafter: SizedDrafter

    def _step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        lengths, counts = self.drafter.lengths, state.draft.counts
        decoders = [
            Decoder(self.target, self.drafter.resized(length), self.rule_structure, None, self.top_log_probs)
            for length in lengths
        ]
        with jax.named_scope("draft"):
            expected = jnp.full(state.length.shape, USUAL_ACCEPTANCE)
            if self.drafter.sparse:
                # A sparse drafter costs next to nothing, but verifying its padding costs as much as verifying a draft.
                # So draft before choosing a length.
                expected = _expected(decoders[-1].drafter, params, state)
            size = best_size(params.draft, lengths, counts, ~state.done, expected)
        info = jax.tree.map(_blank, jax.eval_shape(decoders[-1]._step, params, state)[1])
        for number, decoder in enumerate(decoders):

            def step(_: int, turn: tuple[DecodeState, StepInfo], decoder: Decoder = decoder):
                state, info = decoder._step(params, turn[0])
                # A short draft leaves the greater depths blank.
                return state, jax.tree.map(
                    lambda x, y: lax.dynamic_update_slice(x, y, [0] * x.ndim), turn[1], info
                )

            # A loop of at most one iteration updates its carry in place, whereas XLA copies a cache that goes through
            # a `lax.cond`.
            state, info = lax.fori_loop(0, (size == number).astype(jnp.int32), step, (state, info))
        verdict, length = info.verdict, jnp.asarray(lengths, jnp.int32)[size]
        # Be patient with a sparse drafter, which often finds no draft for a few steps.
        patience = PAUSE if self.drafter.sparse else 1
        counts = counts.after(length, verdict.num_accepted, expected, patience)
        # Past the accepted tokens, a path repeats its last node.
        verdict = dataclasses.replace(verdict, path=lax.cummax(verdict.path, axis=1))
        draft = dataclasses.replace(state.draft, counts=counts)
        return dataclasses.replace(state, draft=draft), dataclasses.replace(info, verdict=verdict)


def _blank(x: jax.ShapeDtypeStruct) -> Array:
    """Return a blank field of a `StepInfo`: `NO_TOKEN`, which equals `NO_KIND`, for integers, otherwise zeros."""
    fill = NO_TOKEN * jnp.issubdtype(x.dtype, jnp.integer)
    return jnp.full(x.shape, fill, x.dtype)


def _expected(drafter: Drafter, params: Params, state: DecodeState) -> Array:
    """Return f32[B]: a drafter's expected acceptance of its next draft; 0 if it finds no draft."""
    tree, _ = propose(drafter, params, state, Conditions.of(params, state), step_keys(state)[0])
    acceptance = jnp.full(state.length.shape, USUAL_ACCEPTANCE)
    if tree.expected is not None:
        # A draft with no expectation consists of tokens that a constraint forces.
        acceptance = jnp.where(tree.expected > 0, tree.expected, USUAL_ACCEPTANCE)
    return jnp.where(jnp.any(tree.tokens[:, 1:] != NO_TOKEN, axis=1), acceptance, 0.0)


def best_size(
    params: SizedParams, lengths: Sequence[int], counts: Counts, live: Array, expected: Array
) -> Array:
    """Return i32[], the index of the size with the most tokens per unit of cost.

    The acceptance is the expected one times the ratio of accepted to expected tokens in recent steps.

    Args:
      params: params with costs f32[n].
      lengths: lengths of the n sizes.
      counts: counts of the rows.
      live: bool[B]; rows that count; if there are none, all rows count.
      expected: f32[B]; the drafter's expected acceptance of each row's next draft; 0: there is no draft.

    >>> import jax
    >>> one, full = jnp.ones((1,), jnp.int32), lambda x: jnp.full((1,), x)
    >>> counts = Counts(accepted=full(90.0), expected=full(80.0), idle=one)
    >>> costs = [SizedParams((), jnp.asarray(c)) for c in ([1.0, 1.5, 2.0], [1.0, 2.0, 5.0])]
    >>> [int(best_size(c, (0, 2, 5), counts, one > 0, full(0.8))) for c in costs]
    [2, 1]
    """
    counted_rows = live | ~jnp.any(live)
    accepted_tokens = jnp.sum(counts.accepted, where=counted_rows) + USUAL_ACCEPTANCE * PRIOR_TOKENS
    expected_tokens = jnp.sum(counts.expected, where=counted_rows) + USUAL_ACCEPTANCE * PRIOR_TOKENS
    # Without a draft nothing is learned, so after a pause choose as if a little more were accepted.
    is_trial = jnp.any(counted_rows & (counts.idle >= PAUSE))
    acceptance = expected * (accepted_tokens / expected_tokens) + jnp.where(is_trial, OPTIMISM, 0.0)
    acceptance = jnp.where(expected > 0, jnp.minimum(acceptance, 1.0), 0.0)
    # Leviathan et al., equation 1: a chain of K gives 1 + a + ... + a^K tokens. mean_powers[k]: the mean of a^(k + 1).
    depths = jnp.arange(1.0, max(lengths) + 1.0, dtype=jnp.float32)
    mean_powers = jnp.mean(acceptance[None] ** depths[:, None], axis=1, where=counted_rows)
    tokens_per_step = jnp.stack([1.0 + jnp.sum(mean_powers[:length]) for length in lengths])
    # Without measurements all sizes are assumed to cost the same.
    speeds = tokens_per_step / jnp.where(params.costs > 0, params.costs, 1.0)
    # Choose size 0 unless a draft is `MARGIN` times as fast, and the shortest of equally fast sizes.
    return jnp.argmax(speeds.at[0].multiply(MARGIN)).astype(jnp.int32)
