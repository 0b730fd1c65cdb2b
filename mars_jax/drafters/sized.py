"""Drafts as long as pays now: each step takes a size, no draft among them, by what the device measures as it goes.

What a step of a size costs is a number, measured or planned; what it gives follows from what the drafter expects of its
draft, and from how that turned out lately, over the rows that are live. The size of the best tokens per second is
taken, on the device, without a host's word. Source of the estimate: Leviathan et al. 2211.17192, section 3.3. B batch,
n sizes.

Oracle: the drafter of a fixed size, token for token, and a simulation in Python (tests/drafters/test_sized.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core import struct
from mars_jax.core.conditions import Conditions
from mars_jax.core.decoder import Decoder, speculative_decoder
from mars_jax.core.drafter import SPARSE, TRUSTS, Drafter, DraftInput, Reads
from mars_jax.core.errors import MarsError
from mars_jax.core.logprobs import LogProbs
from mars_jax.core.rule import facts
from mars_jax.core.step import propose, step_keys
from mars_jax.core.tree import chain, last_token
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

KEEP = 0.95
"""Decay of the counts after every step with a draft: at batch 1 the last twenty steps count, some 60 tested tokens."""
GUESS, WEIGHT = 0.8, 4.0
"""The acceptance of a draft that does not say what is expected of it, and as how many tested tokens expectations count
before anything was seen."""
MARGIN = 1.1
"""A draft is to promise so many times the speed of none: costs leave out what a draft model has to catch up with, and
a batch ends with its slowest row."""
BETTER = 0.1
"""Without a draft nothing is seen. If this much more acceptance would pay, a step drafts to see, now and then."""
PAUSE, LONGEST_PAUSE = 64, 4096
"""Steps without a draft before one drafts to see; twice as many after each that did not pay."""


class SizedParams(NamedTuple):
    """`Params.draft` of a drafter of several sizes."""

    weights: PyTree  # of the drafter
    costs: Any  # f32[n]; of a step of each size, in any unit; 0 not measured yet
    forced: Any  # i32[]; the number of the size that every step takes; -1: what pays


@struct.dataclass(kw_only=True)
class SizedState:
    """Between two steps; [B] each but the drafter's own."""

    draft: PyTree
    cached: Array  # i32; committed tokens that the drafter's cache has, of a drafter that is to catch up
    accepted: Array  # f32; tested tokens that were accepted, the latest counting most
    hoped: Array  # f32; how many of them were expected to be
    idle: Array  # i32; steps since the last draft
    pause: Array  # i32; so many of them before one drafts to see


def usual_sizes(length: int) -> tuple[int, ...]:
    """No draft, all of the length, and half of it where that is two tokens shorter: each size is compiled.

    >>> usual_sizes(5), usual_sizes(3)
    ((0, 3, 5), (0, 3))
    """
    half = (length + 1) // 2
    return (0, half, length) if half + 1 < length else (0, length)


def sized(
    loaded: LoadedDrafter,
    sizes: Sequence[int] | None = None,
    *,
    costs: Sequence[float] | None = None,
    any_rule: bool = False,
) -> LoadedDrafter:
    """Make a drafter that chooses the length of its chain in each step: two or three sizes, one of them no draft.

    Under `exact`, texts of deterministic drafts are those of every fixed size. Sampled texts, as under `rejection`,
    have the same distribution, and their tokens depend on the other rows of the batch.

    A step without a draft leaves a draft model's cache behind; the next draft reads the missing tokens first.

    Args:
      loaded: a drafter of chains with its weights; its own length is the longest.
      sizes: lengths of chains, rising, 0 first; default `usual_sizes` of its length.
      costs: of a step of each size at the batch size at hand, in any unit, such as seconds or what
        `mars-jax plan` says; default: `generate` and `Session` measure them before the first batch of a shape.
      any_rule: let lossy rules verify it, although their texts then depend on what else is in the batch.

    Raises:
      MarsError: a drafter of trees, of one length alone, or of trusted drafts; sizes that do not begin with 0 or do not
        rise to at most the drafter's; costs of another number.

    >>> from mars_jax.drafters.ngram import ngram
    >>> made = sized(LoadedDrafter(ngram(8), (), resized=ngram))
    >>> [size.max_depth for size in made.sizes.drafters]
    [0, 4, 8]
    """
    whole = loaded.drafter
    chains = whole.num_nodes == whole.max_depth + 1
    if loaded.resized is None or not chains or TRUSTS in whole.traits or loaded.sizes is not None:
        raise MarsError(
            f"the drafter '{whole.name}' has no chains of several lengths, of which one could be chosen: draft with "
            "n-grams, a chain of a model or of an EAGLE head, or replay."
        )
    lengths = usual_sizes(whole.max_depth) if sizes is None else tuple(int(size) for size in sizes)
    rising = all(a < b for a, b in itertools.pairwise(lengths))
    if not 2 <= len(lengths) <= 4 or lengths[0] != 0 or not rising or lengths[-1] > whole.max_depth:
        raise MarsError(
            f"sizes are {list(lengths)}: expected two to four lengths that rise from 0 to at most {whole.max_depth}, "
            "the drafter's own."
        )
    if costs is not None and (
        len(costs) != len(lengths) or not all(0 < cost < float("inf") for cost in costs)
    ):
        raise MarsError(
            f"costs are {list(costs)}: expected a positive number for each of the {len(lengths)} sizes."
        )
    # Numbers of the host, which every process of a mesh has.
    given = np.zeros(len(lengths), np.float32) if costs is None else np.asarray(costs, np.float32)
    made = tuple(whole if n == whole.max_depth else loaded.resized(n) for n in lengths[1:])
    longest, drafts = _sized(whole.name, lengths, made)
    return loaded._replace(
        drafter=longest,
        params=SizedParams(loaded.params, given, np.int32(-1)),
        resized=None,
        sizes=Sizes(drafts, lengths, any_rule),
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Drafts of several sizes over one state, of which each step takes one."""

    drafters: tuple[Drafter, ...]
    lengths: tuple[int, ...]  # of their chains, rising from 0
    any_rule: bool  # lossy rules too, whose texts then depend on what else is in the batch

    def decoder(self, target: LanguageModel, longest: Drafter, verify: Any) -> SizedDecoder:
        """The decoder of a target, whose state is that of the longest draft.

        Raises:
          MarsError: as `speculative_decoder`, or a lossy rule.
        """
        if not (self.any_rule or facts(verify).lossless):
            raise MarsError(
                f"the drafter '{longest.name}' drafts as much as pays now, and with the rule {facts(verify).name}, "
                "which is lossy, a text would depend on what else is in its batch: draft a fixed size, verify with a "
                "lossless rule, or make the drafter with any_rule=True."
            )
        made = speculative_decoder(target, longest, verify)
        return SizedDecoder(made.target, longest, made.rule, made.prefill_chunk, sizes=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedDecoder(Decoder):
    """A decoder each step of which drafts as much as pays then, in the shapes of the longest draft.

    The choice is a number on the device, so one program serves every loop; on a mesh each part of the rows chooses
    for itself.
    """

    sizes: Sizes

    def _step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        with jax.named_scope("draft"):
            expected = self._expected(params, state)
            taken = chosen(params.draft, self.sizes.lengths, state.draft, ~state.done, expected)
        steps = [functools.partial(self._sized, size, params) for size in self.sizes.drafters]
        shapes = jax.eval_shape(steps[0], state)[1]
        info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # Loops of one turn or none: a loop works in its state's own buffers, where XLA copies a cache that goes into a
        # branch and comes out of it.
        carry = (taken, state, info)
        for number, step in enumerate(steps):
            carry = lax.while_loop(
                functools.partial(lambda number, carry: carry[0] == number, number),
                functools.partial(lambda step, carry: (jnp.int32(-1), *step(carry[1])), step),
                carry,
            )
        return carry[1:]

    def _expected(self, params: Params, state: DecodeState) -> Array:
        """f32[B]: the acceptance that the drafter expects of the next draft; 0 where a sparse one finds nothing."""
        if SPARSE not in self.drafter.traits:
            return jnp.full(state.length.shape, GUESS)
        # To copy costs next to nothing, and what finds nothing would cost as much as what drafts: it looks beforehand.
        draft_keys, _ = step_keys(state)
        tree, _ = propose(self.drafter, params, state, Conditions.of(params, state), draft_keys)
        return _told(tree)

    def _sized(self, size: Drafter, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """A step of one of the sizes, in the shapes of the longest."""
        decoder = Decoder(self.target, size, self.rule, self.prefill_chunk)
        next_state, info = decoder._step(params, state)
        return next_state, widened(info, self.max_depth - size.max_depth)


@functools.lru_cache
def _sized(
    name: str, lengths: tuple[int, ...], made: tuple[Drafter, ...]
) -> tuple[Drafter, tuple[Drafter, ...]]:
    """The longest drafter over `SizedState`, and all the sizes; equal arguments give the same, so compile once."""
    longest = made[-1]

    def own(params: Params) -> Params:
        return params._replace(draft=params.draft.weights)

    def init(params: Params, tokens: Array, length: Array) -> SizedState:
        batch = length.shape[0]
        # Where no draft is to be expected, a draft model does not read the prompt either; `catch_up` would.
        reads = longest.catch_up is None or _best(params.draft, lengths, jnp.asarray([GUESS + BETTER])) > 0
        read = jnp.where(reads, length, jnp.minimum(length, 2))
        # Arrays of their own: a loop that is given the state may not be given one buffer twice.
        return SizedState(
            draft=longest.init(own(params), tokens, read),
            # Of a single token none is cached: what goes on from here reads the text from place 0 on.
            cached=jnp.maximum(read - 2, 0),
            accepted=jnp.zeros((batch,), jnp.float32),
            hoped=jnp.zeros((batch,), jnp.float32),
            idle=jnp.zeros((batch,), jnp.int32),
            pause=jnp.full((batch,), PAUSE, jnp.int32),
        )

    def observe(params: Params, state: SizedState, *rest: Any) -> SizedState:
        assert longest.reads is not None
        return dataclasses.replace(state, draft=longest.reads.observe(own(params), state.draft, *rest))

    def catch_up(
        params: Params, state: SizedState, tokens: Array, cached: Array, length: Array
    ) -> SizedState:
        # What is missing is fed before the next draft. What was accepted of the text so far still counts.
        return dataclasses.replace(state, cached=jnp.minimum(state.cached, cached))

    drafts = [_drafting(size) for size in made]
    reads = longest.reads
    whole = drafts[-1]._replace(
        init=init,
        reads=None if reads is None else Reads(reads.layers, observe),
        name=f"{name}, as long as pays",
        catch_up=catch_up,
        traits=longest.traits,
    )
    return whole, (_idle(longest), *drafts)


def chosen(
    params: SizedParams, lengths: Sequence[int], state: SizedState, live: Array, expected: Array
) -> Array:
    """i32[]: the number of the size that gives most tokens for its cost; the shorter one of equal ones, and none
    where no draft gives `MARGIN` times as many.

    With an acceptance a, a chain of K gives 1 + a + ... + a^K tokens a step. It is the expected one, times what was
    accepted lately of what was expected.

    Args:
      params: with costs f32[n].
      lengths: of the n sizes.
      state: of the rows.
      live: bool[B]; the rows that count, all where none does.
      expected: f32[B]; the acceptance that the drafter expects of each row's next draft; 0 of none.

    >>> import jax
    >>> one, full = jnp.ones((1,), jnp.int32), lambda x: jnp.full((1,), x)
    >>> state = SizedState(draft=(), cached=one, accepted=full(90.0), hoped=full(80.0), idle=one, pause=one * 9)
    >>> costs = [SizedParams((), jnp.asarray(c), jnp.int32(-1)) for c in ([1.0, 1.5, 2.0], [1.0, 2.0, 5.0])]
    >>> [int(chosen(c, (0, 2, 5), state, one > 0, full(0.8))) for c in costs]
    [2, 1]
    """
    counts = live | ~jnp.any(live)
    total = lambda x: jnp.sum(jnp.where(counts, x, 0))  # noqa: E731
    # To begin with WEIGHT tokens of a usual draft turned out as expected.
    right = (total(state.accepted) + GUESS * WEIGHT) / (total(state.hoped) + GUESS * WEIGHT)
    drafts = counts & (expected > 0)
    acceptance = jnp.where(drafts, expected * right, 0.0)
    # Without a draft nothing is learned, so after a pause the choice is made as if a little more were accepted.
    now, better = (
        _best(params, lengths, x, counts) for x in (acceptance, jnp.where(drafts, acceptance + BETTER, 0.0))
    )
    waited = jnp.max(jnp.where(counts, state.idle - state.pause, -1)) >= 0
    return jnp.where((now == 0) & waited, better, now)


def _best(
    params: SizedParams, lengths: Sequence[int], acceptance: Array, counts: Array | None = None
) -> Array:
    """i32[]: the number of the size that gives most tokens for its cost at this acceptance f32[B], or the forced one.

    None, where no draft gives `MARGIN` times as many. Only rows that count bool[B] do, default all.
    """
    powers = jnp.cumprod(
        jnp.broadcast_to(jnp.minimum(acceptance, 1.0), (max(lengths), *acceptance.shape)), axis=0
    )
    # Leviathan et al., equation 1: 1 + a + ... + a^K tokens a step, bonus token included. powers[i] is a^(i + 1).
    powers = jnp.mean(powers, axis=1, where=counts)
    tokens = [1.0 + jnp.sum(powers[:length]) for length in lengths]
    # What has not been measured costs the same whatever is drafted.
    costs = jnp.where(params.costs > 0, params.costs, 1.0)
    # Size 0 comes first, and a draft has to beat it by MARGIN; of equal speeds argmax takes the shorter.
    speeds = (jnp.stack(tokens) / costs).at[0].multiply(MARGIN)
    best = jnp.argmax(speeds).astype(jnp.int32)
    return jnp.where(params.forced >= 0, params.forced, best)


def _idle(longest: Drafter) -> Drafter:
    """The size 0."""

    def propose(params: Params, state: SizedState, given: DraftInput) -> tuple[DraftTree, SizedState]:
        return chain(last_token(given)), state

    def update(
        params: Params,
        state: SizedState,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> SizedState:
        draft = state.draft
        if longest.catch_up is None:
            # One that reads the target's features, which are gone after the step.
            own = params._replace(draft=params.draft.weights)
            draft = longest.update(own, draft, tree, verdict, output, length)
        return dataclasses.replace(state, draft=draft, idle=state.idle + 1)

    return longest._replace(
        propose=propose,
        update=update,
        traits=(),
        num_nodes=1,
        max_depth=0,
        name="none",
    )


def _drafting(size: Drafter) -> Drafter:
    """A size that drafts, over the state of all of them."""

    def propose(params: Params, state: SizedState, given: DraftInput) -> tuple[DraftTree, SizedState]:
        own = params._replace(draft=params.draft.weights)
        draft = state.draft
        if size.catch_up is not None:
            draft = size.catch_up(own, draft, given.tokens, state.cached, given.length)
        tree, draft = size.propose(own, draft, given)
        return tree, dataclasses.replace(state, draft=draft)

    def update(
        params: Params,
        state: SizedState,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> SizedState:
        own = params._replace(draft=params.draft.weights)
        # The first that is rejected ends the walk, and what follows it is not tested. Padding at the end counts as
        # rejected: what is not drafted gives nothing either.
        tested = jnp.minimum(verdict.num_accepted + 1, size.max_depth)
        # After a pause what was seen before it counts half. A drafter that found nothing did not pause.
        paused = state.idle >= (state.pause if SPARSE in size.traits else 1)
        keep = jnp.where(paused, KEEP / 2, KEEP)
        return SizedState(
            draft=size.update(own, state.draft, tree, verdict, output, length),
            # The new length is length + num_accepted + 1, and a draft model's cache ends two tokens before it.
            cached=length + verdict.num_accepted - 1,
            accepted=keep * state.accepted + verdict.num_accepted.astype(jnp.float32),
            hoped=keep * state.hoped + _told(tree) * tested.astype(jnp.float32),
            idle=jnp.zeros_like(state.idle),
            pause=jnp.where(paused, jnp.minimum(2 * state.pause, LONGEST_PAUSE), PAUSE),
        )

    # A draft is as often idle as pays: a step of the root alone is a size of its own.
    return size._replace(
        propose=propose, update=update, traits=tuple(trait for trait in size.traits if trait != SPARSE)
    )


def _told(tree: DraftTree) -> Array:
    """f32[B]: the acceptance that a drafter expects of its draft; 0 where it has none."""
    found = jnp.any(tree.tokens[:, 1:] != NO_TOKEN, axis=1)
    # A draft of which nothing is expected holds what a constraint put in.
    said = GUESS if tree.expected is None else jnp.where(tree.expected > 0, tree.expected, GUESS)
    return jnp.where(found, said, 0.0)


def widened(info: StepInfo, max_depth: int) -> StepInfo:
    """Pad a step's info to that of a step whose drafts are `max_depth` deeper, such as 5 where nothing was drafted."""

    def wider(name: str, fill: float) -> Array:
        return jnp.pad(getattr(info, name), ((0, 0), (0, max_depth)), constant_values=fill)

    fills = {"emitted": NO_TOKEN, "kind": NO_KIND, "regret": 0.0}
    fills |= dict.fromkeys(LogProbs._fields, 0.0)
    depth = info.verdict.path.shape[1]
    # A verdict may have arrays of its own, such as a margin at each node of the path.
    own = {
        field.name: x
        for field in dataclasses.fields(info.verdict)
        if isinstance(x := getattr(info.verdict, field.name), Array) and x.ndim > 1 and x.shape[1] == depth
    }
    verdict = dataclasses.replace(
        info.verdict,
        **{
            name: jnp.pad(x, ((0, 0), (0, max_depth), *[(0, 0)] * (x.ndim - 2)))
            for name, x in own.items()
            if name != "path"
        },
        path=jnp.pad(
            info.verdict.path, ((0, 0), (0, max_depth)), mode="edge"
        ),  # the last node, again and again
        relaxed=jnp.pad(info.verdict.relaxed, ((0, 0), (0, max_depth))),
    )
    return dataclasses.replace(
        info, verdict=verdict, **{name: wider(name, fill) for name, fill in fills.items()}
    )


def measured(loaded: LoadedDrafter, costs: Sequence[float]) -> LoadedDrafter:
    """The drafter with costs f32[n] of its sizes, and with no size forced."""
    return loaded._replace(
        params=loaded.params._replace(costs=np.asarray(costs, np.float32), forced=np.int32(-1))
    )


def forced(loaded: LoadedDrafter, size: int) -> LoadedDrafter:
    """The drafter, every step of which takes the size of this number, such as 0 for no draft."""
    return loaded._replace(params=loaded.params._replace(forced=np.int32(size)))


def is_measured(loaded: LoadedDrafter) -> bool:
    """True where the costs of all sizes are known, or there is one size alone."""
    return loaded.sizes is None or bool(np.all(np.asarray(loaded.params.costs) > 0))
