"""Adaptive draft length: each step picks the chain length, possibly 0, with the highest estimated tokens per second.

The cost of a step at each length is either given or measured. The number of tokens per step is estimated from the
drafter's expected acceptance rate, corrected by the observed acceptance of recent drafts in the live rows. The length
is chosen on the device. Source of the estimate: Leviathan et al. 2211.17192, section 3.3. B batch, n lengths.

Tested token for token against a drafter of fixed length, and against a simulation in Python
(tests/drafters/test_sized.py).
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
"""Factor by which the counts decay after each step with a draft. At batch size 1, the counts cover about the last 20
steps, or 60 tokens."""
USUAL_ACCEPTANCE, PRIOR_TOKENS = 0.7, 3.0
"""Acceptance rate assumed for a drafter that does not estimate its own. The counts start as if `PRIOR_TOKENS` draft
tokens had been accepted at this rate. The rate is moderate so that short answers are not slowed down by drafts that are
expensive compared with a step."""
MARGIN = 1.1
"""Minimum estimated speedup for which a draft is worthwhile. It exceeds 1 because the costs do not include the tokens
that a draft model must process to catch up, and because a batch is done only when its slowest row is."""
OPTIMISM = 0.1
"""Amount added to the acceptance rate in a trial. Steps without a draft do not measure acceptance, so occasionally try
a draft that would be worthwhile at this higher rate."""
PAUSE = 32
"""Number of steps without a draft before a trial. A rejected draft takes about as long as one or two of these steps."""


class Counts(NamedTuple):
    """Per-row counts from which a step estimates the acceptance rate; stored in `SkippingState.counts`."""

    accepted: Array  # f32[B]; decayed count of accepted tokens
    expected: Array  # f32[B]; decayed sum of the expected acceptance rates of tested tokens
    idle: Array  # i32[B]; steps since the last draft

    def after(self, length: Array, num_accepted: Array, expected: Array, patience: int) -> Counts:
        """Return the counts after a step with a draft of `length` i32[] tokens. `expected` is as in `best_size`.

        If the row had no draft for `patience` or more steps, also halve the weight of the older counts.
        """
        # Tokens after the first rejected one are not tested. Padding at the end of a chain counts as rejected.
        num_tested = jnp.minimum(num_accepted + 1, length).astype(jnp.float32)
        decay = jnp.where(length > 0, jnp.where(self.idle >= patience, DECAY / 2, DECAY), 1.0)
        return Counts(
            decay * self.accepted + num_accepted.astype(jnp.float32),
            decay * self.expected + expected * num_tested,
            jnp.where(length > 0, 0, self.idle + 1),
        )


def usual_sizes(length: int) -> tuple[int, ...]:
    """Return the default sizes: 0, half the length if that is at least two tokens shorter, and the full length.

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
    """Wrap a drafter so that each step chooses the length of the drafted chain.

    With the rule `exact` and greedy drafts, the emitted tokens are the same as with any fixed length. With a sampling
    rule such as `rejection`, the output distribution is unchanged, but the tokens depend on the other rows of the
    batch.

    Steps without a draft do not update the drafter's cache. Before the next draft, the drafter processes the tokens
    that the cache lacks.

    Args:
      loaded: a drafter, which must draft chains, with its weights; its chain length is the maximum length.
      sizes: two to four increasing chain lengths, the first of which is 0; default: `usual_sizes` of the drafter's
        length.
      costs: positive cost of a step at each size, for the intended batch size, in any unit; for example, seconds or the
        estimate of `mars-jax plan`. By default, `generate` and `Session` measure the costs before the first batch of
        each shape.
      any_rule: also allow lossy rules, although their completions then depend on the other rows of the batch.

    Raises:
      MarsError: the drafter drafts trees, supports only one length, may draft `trusted` nodes, or has both `catch_up`
        and `reads`; or the sizes or costs are invalid.

    >>> from mars_jax.drafters.ngram import ngram
    >>> adaptive = sized(LoadedDrafter(ngram(8), ()))
    >>> adaptive.sizes.lengths
    (0, 4, 8)
    """
    longest = loaded.drafter
    # After a step without a draft, the drafter can catch up on tokens or on the target's outputs, but not on both.
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
    """Return the drafter with its step costs set to `costs` f32[n]."""
    # A host array exists in every process of a mesh.
    return loaded._replace(params=loaded.params._replace(costs=np.asarray(costs, np.float32)))


def with_size(loaded: LoadedDrafter, index: int) -> LoadedDrafter:
    """Return the drafter with every step fixed to the size at `index`. Index 0 disables drafting."""
    # A size with an infinite cost is never chosen.
    return with_step_costs(loaded, np.where(np.arange(len(loaded.params.costs)) == index, 1.0, np.inf))


@dataclasses.dataclass(frozen=True)
class SizedDrafter(Skipping):
    """A drafter whose decoder chooses among several lengths.

    Without that decoder, every draft has the maximum length.
    """

    lengths: tuple[int, ...] = ()  # chain lengths, increasing from 0
    any_rule: bool = False  # also allow lossy rules
    sparse: bool = False

    @property
    def name(self) -> str:
        return f"{self.longest.name}, adaptive length"

    def decoder(self, target: LanguageModel, verify: Rule) -> Decoder:
        """Return the decoder for a target.

        Raises:
          MarsError: the rule is lossy and `any_rule` is not set; see also `speculative_decoder`.
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
            # Choose a size as if a trial draft were due. If even then the best size is 0, skip the draft model's
            # prefill; `catch_up` can process the prompt later.
            trial_counts = counts._replace(idle=counts.idle + PAUSE)
            size = best_size(params.draft, self.lengths, trial_counts, length > 0, zeros + USUAL_ACCEPTANCE)
            cached_length = jnp.where(size > 0, length, jnp.minimum(length, 2))
        return dataclasses.replace(super().init(params, tokens, cached_length), counts=counts)


@dataclasses.dataclass(frozen=True)
class SizedDecoder(Decoder):
    """A decoder that chooses a draft length in each step. Its arrays have the shapes of the longest draft.

    The chosen length is a number on the device, so one program contains the steps of all lengths. On a mesh, each shard
    of the rows chooses its own length.
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
                # Drafting with a sparse drafter costs next to nothing, but verifying padding costs as much as verifying
                # a draft. So draft first and then choose a length.
                expected = _expected(decoders[-1].drafter, params, state)
            size = best_size(params.draft, lengths, counts, ~state.done, expected)
        info = jax.tree.map(_blank, jax.eval_shape(decoders[-1]._step, params, state)[1])
        for number, decoder in enumerate(decoders):

            def step(_: int, turn: tuple[DecodeState, StepInfo], decoder: Decoder = decoder):
                state, info = decoder._step(params, turn[0])
                # If the draft is shorter than the longest one, the entries at greater depths stay blank.
                return state, jax.tree.map(
                    lambda x, y: lax.dynamic_update_slice(x, y, [0] * x.ndim), turn[1], info
                )

            # Use a loop of at most one iteration, which updates its carry in place. XLA would copy a cache passed
            # through `lax.cond`.
            state, info = lax.fori_loop(0, (size == number).astype(jnp.int32), step, (state, info))
        verdict, length = info.verdict, jnp.asarray(lengths, jnp.int32)[size]
        # Allow a sparse drafter more idle steps, because it often finds no draft for several steps in a row.
        patience = PAUSE if self.drafter.sparse else 1
        counts = counts.after(length, verdict.num_accepted, expected, patience)
        # After the accepted nodes, a path repeats its last node.
        verdict = dataclasses.replace(verdict, path=lax.cummax(verdict.path, axis=1))
        draft = dataclasses.replace(state.draft, counts=counts)
        return dataclasses.replace(state, draft=draft), dataclasses.replace(info, verdict=verdict)


def _blank(x: jax.ShapeDtypeStruct) -> Array:
    """Return a blank `StepInfo` field: `NO_TOKEN`, which equals `NO_KIND`, for integers, and zeros otherwise."""
    fill = NO_TOKEN * jnp.issubdtype(x.dtype, jnp.integer)
    return jnp.full(x.shape, fill, x.dtype)


def _expected(drafter: Drafter, params: Params, state: DecodeState) -> Array:
    """Return the expected acceptance rate of a drafter's next draft, f32[B]; 0 in rows without a draft."""
    tree, _ = propose(drafter, params, state, Conditions.of(params, state), step_keys(state)[0])
    acceptance = jnp.full(state.length.shape, USUAL_ACCEPTANCE)
    if tree.expected is not None:
        # `tree.expected` is 0 if a constraint forced all drafted tokens.
        acceptance = jnp.where(tree.expected > 0, tree.expected, USUAL_ACCEPTANCE)
    return jnp.where(jnp.any(tree.tokens[:, 1:] != NO_TOKEN, axis=1), acceptance, 0.0)


def best_size(
    params: SizedParams, lengths: Sequence[int], counts: Counts, live: Array, expected: Array
) -> Array:
    """Return the index i32[] of the size with the highest estimated number of tokens per unit of cost.

    The estimated acceptance rate is the expected one times the ratio of accepted to expected tokens in recent steps.

    Args:
      params: params of the drafter, with costs f32[n].
      lengths: the n chain lengths.
      counts: acceptance counts of the rows.
      live: bool[B]; rows to include in the estimate; if none is live, include all.
      expected: f32[B]; expected acceptance rate of each row's next draft; 0: the row has no draft.

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
    # Steps without a draft do not update the estimate, so after a pause assume a slightly higher acceptance rate.
    is_trial = jnp.any(counted_rows & (counts.idle >= PAUSE))
    acceptance = expected * (accepted_tokens / expected_tokens) + jnp.where(is_trial, OPTIMISM, 0.0)
    acceptance = jnp.where(expected > 0, jnp.minimum(acceptance, 1.0), 0.0)
    # Leviathan et al., equation 1: a chain of K tokens yields 1 + a + ... + a^K tokens on average. mean_powers[k] is
    # the mean of a^(k + 1) over the rows.
    depths = jnp.arange(1.0, max(lengths) + 1.0, dtype=jnp.float32)
    mean_powers = jnp.mean(acceptance[None] ** depths[:, None], axis=1, where=counted_rows)
    tokens_per_step = jnp.stack([1.0 + jnp.sum(mean_powers[:length]) for length in lengths])
    # If costs have not been measured, assume that all sizes cost the same.
    speeds = tokens_per_step / jnp.where(params.costs > 0, params.costs, 1.0)
    # Choose the fastest size, or the shortest if several are equally fast. A draft must be more than `MARGIN` times as
    # fast as size 0.
    return jnp.argmax(speeds.at[0].multiply(MARGIN)).astype(jnp.int32)
