"""The step: draft, one target forward, verify, commit, emit. And the two loops over it.

B batch, N nodes, D depth, T token buffer, S slots, V vocabulary. Oracle: greedy autoregression of the same model,
token for token (tests/core/test_decode.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core import rule_values
from mars_jax.core.cut import cut
from mars_jax.core.edits import edited
from mars_jax.core.emit import emit, widened
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.extend import extend_by
from mars_jax.core.given import check_places, check_prompts, check_same, check_settings, rows_of
from mars_jax.core.guide import Guide, Guides, first_states, guide_of
from mars_jax.core.insert import insert_by, put_by
from mars_jax.core.mesh import by_rows
from mars_jax.core.metrics import DecodeStats, accumulate, zero_stats
from mars_jax.core.prefill import observed_prefill
from mars_jax.core.tree import chain, visible
from mars_jax.core.trusted import judged
from mars_jax.core.types import (
    NO_TOKEN,
    Controls,
    Decoder,
    DecodeState,
    Drafter,
    DraftInput,
    DraftTree,
    LanguageModel,
    Params,
    PyTree,
    StepInfo,
    Verifier,
)


def speculative_decoder(
    target: LanguageModel, drafter: Drafter, verify: Verifier, *, prefill_chunk: int | None = None
) -> Decoder:
    """Speculative decoding (Leviathan et al. 2211.17192) with any drafter and any verifier, as two pure functions.

    Equal arguments give the same `Decoder`, so whatever was compiled for it is found again. Of `verify` only the
    structure counts: rules that differ in numbers are one decoder, and `init` puts the numbers into the state.

    Args:
      target: the model whose text this is.
      drafter: proposes the trees; `drafters.none()` for plain autoregression.
      verify: decides how far to walk; see `mars_jax.verify`.
      prefill_chunk: prompt tokens per prefill forward of the target; None takes its own, and where it has none what
        suits the backend: see `prefill.chunk_of`. A draft model goes by its own.

    Returns:
      `Decoder(init, step, max_depth, insert, put, extend)`:
      `init(params, prompts i32[B, T], lengths i32[B], controls, rule, keys key[B]) -> DecodeState` takes the prompts
      left-aligned in the token buffer, whose width T bounds prompt and continuation together, and a rule of the
      structure of `verify`, whose numbers are one value or one per row;
      `step(params, state) -> (state, StepInfo)` advances every live row by 1 to D + 1 tokens;
      `insert(params, state, rows i32[b], prompts i32[b, t], lengths i32[b], controls, rule, keys key[b]) -> state`
      starts the named rows of a running state anew, and leaves every bit of the others. `rows` names each at most once,
      -1 none; t is at most T. On a mesh whose `data` has d devices the i-th of d equal parts of `rows` names rows of
      the i-th part of the state, and none of another.
      `put(state, rows i32[b], read, controls, rule, keys key[b]) -> state` does the same with prompts that another
      state of b rows has read already, on no mesh that divides rows.
      `extend(params, state, prompts i32[B, t], lengths i32[B], controls, rule, keys key[B]) -> (state, read i32[B])`
      goes on with other prompts in every row, as the next turn of a conversation is one, and reads only what comes
      after the longest beginning that a row has committed already; see `core.extend`.
      All are transformable; jit and donate at the outermost edge, or use `run`, `stream`, `refill` and `extend`.

    Raises:
      MarsError: the drafter speaks another vocabulary than the target, or needs features that it does not give; the
        rule is none, or lossy where the drafter's size follows the batch; prefill_chunk is below 1.
        The functions: a rule of another structure, keys of another generator than `keys_from_seeds` gives, arrays of
        other shapes or dtypes, a state of another decoder, and, where they can be seen, lengths outside of 1 .. t,
        tokens outside of the vocabulary, and rows that are not of the state or are named twice; see `core.given`.

    Example:
      >>> from mars_jax import drafters, fake, verify
      >>> from mars_jax.core.controls import make_controls
      >>> model = fake.hash_model(vocab_size=11)
      >>> from mars_jax.core.types import keys_from_seeds
      >>> rule = verify.mars(theta=0.9)
      >>> decoder = speculative_decoder(model, drafters.ngram(4), rule)
      >>> state = decoder.init(Params(target=()), jnp.ones((1, 32), jnp.int32), jnp.array([3], jnp.int32),
      ...                      make_controls(1, limit=32), rule, keys_from_seeds(jnp.arange(1)))
      >>> state = jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: decoder.step(Params(()), s)[0], state)
      >>> int(state.length[0])
      32
    """
    if prefill_chunk is not None and prefill_chunk < 1:
        raise MarsError(f"prefill_chunk is {prefill_chunk}: expected a whole number of at least 1, or None.")
    if drafter.sizes and not (drafter.any_rule or rule_values.lossless(verify)):
        raise MarsError(
            f"the drafter '{drafter.name}' drafts as much as pays now, and with the rule "
            f"{rule_values.name_of(verify)}, which is lossy, a text would depend on what else is in "
            "its batch: draft a fixed size, verify with a lossless rule, or make the drafter with any_rule=True."
        )
    return _decoder(target, drafter, rule_values.structure(verify), prefill_chunk)


@functools.lru_cache(maxsize=64)
def _decoder(target: LanguageModel, drafter: Drafter, structure: Any, prefill_chunk: int | None) -> Decoder:
    if drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        raise MarsError(
            f"the drafter '{drafter.name}' has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: pair models that share a tokenizer."
        )

    if drafter.feature_layers:
        if target.with_features is None:
            raise MarsError(
                f"the drafter '{drafter.name}' reads the outputs of the target's layers {drafter.feature_layers}, and "
                "this target gives none: set LanguageModel.with_features."
            )
        target = target.with_features(drafter.feature_layers)
    observe = drafter.observe or (lambda params, state, *_: state)

    def init(
        params: Params, prompts: Array, lengths: Array, controls: Controls, rule: PyTree, keys: Array
    ) -> DecodeState:
        batch, buffer = prompts.shape
        # Copies: `run` and `stream` take the state's buffers, and the caller keeps what it gave.
        prompts, lengths = jnp.array(prompts, jnp.int32), jnp.array(lengths, jnp.int32)
        controls, rule, keys = jax.tree.map(jnp.copy, (controls, rule, keys))
        cache = target.init_cache(batch, buffer + drafter.num_nodes)
        cache, draft = observed_prefill(
            target,
            params.target,
            prompts,
            lengths - 1,
            cache,
            drafter.init(params, prompts, lengths),
            lambda state, first, output: observe(params, state, prompts, first, lengths, output),
            chunk=prefill_chunk,
        )
        return DecodeState(
            tokens=prompts,
            length=lengths,
            # An array of its own: a loop that is given the state may not be given one buffer twice.
            prompt_length=jnp.copy(lengths),
            done=lengths >= jnp.minimum(controls.limit, buffer),
            failed=jnp.zeros((batch,), bool),
            cache=cache,
            draft=draft,
            controls=controls,
            rule=rule,
            keys=keys,
            guides=first_states(controls),
        )

    def checked(count: int, controls: Controls, rule: PyTree, keys: Array) -> PyTree:
        """The rule with a number for each of so many rows."""
        if rule_values.structure(rule) != structure:
            raise MarsError(
                f"the rule {rule_values.name_of(rule)} is not of the structure that this decoder was made for: give "
                "speculative_decoder the same rule; only its numbers may differ."
            )
        check_settings(controls, keys, count)
        return rule_values.for_rows(rule, count)

    def check_cache(state: DecodeState) -> None:
        batch, buffer = state.tokens.shape
        own = jax.eval_shape(lambda: target.init_cache(batch, buffer + drafter.num_nodes))
        check_same("cache", state.cache, own)

    def checked_init(
        params: Params, prompts: Array, lengths: Array, controls: Controls, rule: PyTree, keys: Array
    ) -> DecodeState:
        check_prompts(prompts, lengths, target.vocab_size)
        rule = checked(prompts.shape[0], controls, rule, keys)
        return by_rows(init)(params, prompts, lengths, controls, rule, keys)

    insert_rows = insert_by(init, target, check_cache)
    put_rows = put_by(target, check_cache)
    extend_rows = extend_by(target, drafter, check_cache, chunk=prefill_chunk)

    def insert(
        params: Params,
        state: DecodeState,
        rows: Array,
        prompts: Array,
        lengths: Array,
        controls: Controls,
        rule: PyTree,
        keys: Array,
    ) -> DecodeState:
        check_prompts(prompts, lengths, target.vocab_size)
        check_places(rows, prompts.shape[0], rows_of(state))
        rule = checked(prompts.shape[0], controls, rule, keys)
        return insert_rows(params, state, rows, prompts, lengths, controls, rule, keys)

    def put(
        state: DecodeState, rows: Array, read: DecodeState, controls: Controls, rule: PyTree, keys: Array
    ) -> DecodeState:
        count = rows_of(read)
        check_places(rows, count, rows_of(state))
        return put_rows(state, rows, read, controls, checked(count, controls, rule, keys), keys)

    def extend(
        params: Params,
        state: DecodeState,
        prompts: Array,
        lengths: Array,
        controls: Controls,
        rule: PyTree,
        keys: Array,
    ) -> tuple[DecodeState, Array]:
        check_prompts(prompts, lengths, target.vocab_size)
        rule = checked(prompts.shape[0], controls, rule, keys)
        return extend_rows(params, state, prompts, lengths, controls, rule, keys)

    def step(params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        if not drafter.sizes:
            return step_by(drafter, params, state)
        assert drafter.choose is not None
        with jax.named_scope("draft"):
            chosen = drafter.choose(params, state.draft, ~state.done)
        shapes = jax.eval_shape(functools.partial(sized, drafter.sizes[0], params), state)[1]
        info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # Loops of one turn or none: a loop works in its state's own buffers, where XLA copies a cache that goes into a
        # branch and comes out of it.
        carry = (chosen, state, info)
        for number, size in enumerate(drafter.sizes):
            carry = lax.while_loop(
                functools.partial(lambda number, carry: carry[0] == number, number),
                functools.partial(lambda size, carry: (jnp.int32(-1), *sized(size, params, carry[1])), size),
                carry,
            )
        return carry[1:]

    def sized(size: Drafter, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """A step of one of the sizes, in the shapes of the deepest."""
        next_state, info = step_by(size, params, state)
        return next_state, widened(info, drafter.max_depth - size.max_depth)

    def step_by(drafter: Drafter, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        # Draws of the target depend on the position alone, so that a row gives the same text alone, in any batch, and
        # after any deterministic draft. A draft's own draws are fresh in every step.
        draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
        draft_keys = jax.vmap(jax.random.fold_in)(draft_keys, state.length)
        guide = guide_of("constraint", params, state)
        given = DraftInput(
            keys=draft_keys,
            tokens=state.tokens,
            length=state.length,
            controls=state.controls,
            guide=guide,
            # Nobody knows what a rule reads that does not say what it needs.
            hidden="draft_hidden" in getattr(state.rule, "needs", ("draft_hidden",)),
        )
        # The names are what a profiler and `planning.cost` see of the step; they change nothing in the program.
        with jax.named_scope("draft"):
            tree, draft = drafter.propose(params, state.draft, given)
            if guide is not None:
                # What a drafter with a cache has not drafted itself, its cache would not have.
                tree = guide.steered(tree, fill=not jax.tree.leaves(draft))
        drafted = functools.partial(verified, drafter, params, state, draft, verify_keys, guide)
        if not drafter.sparse or tree.max_depth == 0:
            return drafted(tree)

        def plain() -> tuple[DecodeState, StepInfo]:
            next_state, info = drafted(chain(tree.tokens[:, :1]))
            return next_state, widened(info, tree.max_depth)

        nothing = ~jnp.any(tree.tokens[:, 1:] != NO_TOKEN)
        try:
            # On an accelerator some nodes more cost next to nothing, and there one form is compiled.
            return lax.platform_dependent(
                nothing,
                cpu=lambda nothing: lax.cond(nothing, plain, lambda: drafted(tree)),
                default=lambda _: drafted(tree),
            )
        except TypeError:
            # A verdict with arrays of its own has other shapes in a step of one node, and nobody knows what they are.
            return drafted(tree)

    def verified(
        drafter: Drafter,
        params: Params,
        state: DecodeState,
        draft: PyTree,
        verify_keys: Array,
        guide: Guide | None,
        tree: DraftTree,
    ) -> tuple[DecodeState, StepInfo]:
        """The rest of a step, from the tree on."""
        start = state.length - 1
        span = guide_of("span", params, state)
        held = None if guide is None else guide.on(tree)
        spanned = None if span is None else span.on(tree)
        with jax.named_scope("target"):
            output = target.forward(params.target, tree.tokens, visible(tree, start), state.cache)
            raw = logits = target.unembed(params.target, output.hidden)
            if (edits := state.controls.edits) is not None:
                logits = edited(raw, edits, tree, state.tokens, state.prompt_length, state.length)
            if held is not None:
                logits = held.masked(logits)
        evidence = Evidence(
            keys=verify_keys,
            start=start,
            prompt_length=state.prompt_length,
            tree=tree,
            logits=logits,
            hidden=output.hidden,
            controls=state.controls,
            params=params.verify,
            strict_nodes=None if spanned is None else spanned.strict,
        )
        with jax.named_scope("verify"):
            if tree.trusted is None:
                verdict, rule = state.rule(evidence)
                trusted = None
            else:
                verdict, rule, trusted = judged(state.rule, evidence)
            if (edits is not None or held is not None) and not rule_values.lossless(state.rule):
                verdict = cut(verdict, evidence)
        with jax.named_scope("update"):
            draft = drafter.update(params, draft, tree, verdict, output, state.length)
        with jax.named_scope("emit"):
            ended = None if held is None else held.ended(verdict)
            next_state, info = emit(state, tree, verdict, raw, logits, trusted, ended)
        if state.guides is not None:
            states = Guides(
                constraint=None if held is None else held.after(verdict),
                span=None if spanned is None else spanned.after(verdict),
            )
            states = jax.tree.map(functools.partial(_unless_done, state.done), states, state.guides)
            next_state = dataclasses.replace(next_state, guides=states)
        with jax.named_scope("commit"):
            cache = output.cache if tree.is_chain else target.commit(output.cache, start, verdict.path)
        rule = jax.tree.map(functools.partial(_unless_done, state.done), rule, state.rule)
        return dataclasses.replace(next_state, cache=cache, draft=draft, rule=rule), info

    return Decoder(
        init=checked_init,
        step=by_rows(step),
        max_depth=drafter.max_depth,
        insert=insert,
        put=put,
        extend=extend,
        vocab_size=target.vocab_size,
    )


def _unless_done(done: Array, new: Array, old: Array) -> Array:
    """A rule's state moves on in live rows only."""
    if new is old:
        return old
    return jnp.where(done.reshape((-1,) + (1,) * (new.ndim - 1)), old, new)


def start(
    decoder: Decoder,
    params: Params,
    prompts: Array,
    lengths: Array,
    controls: Controls,
    rule: PyTree,
    keys: Array,
) -> DecodeState:
    """`decoder.init`, checked and compiled. A number of the rule may be one value or one per row."""
    check_prompts(prompts, lengths, decoder.vocab_size)
    rule = rule_values.for_rows(rule, prompts.shape[0])
    return _start(decoder, params, prompts, lengths, controls, rule, keys)


def shapes(decoder: Decoder, params: Params, *arguments: Any) -> DecodeState:
    """The state that `start` gives for these arguments, as `jax.ShapeDtypeStruct`."""
    prompts, lengths, controls, rule, keys = arguments
    rule = rule_values.for_rows(rule, prompts.shape[0])
    return _start.eval_shape(decoder, params, prompts, lengths, controls, rule, keys)


@functools.partial(jax.jit, static_argnums=0)
def _start(decoder: Decoder, *arguments: Any) -> DecodeState:
    return decoder.init(*arguments)


@functools.partial(jax.jit, static_argnums=0, static_argnames="record", donate_argnums=2)
def run(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    *,
    record: bool = False,
    max_steps: Any = None,
) -> tuple[DecodeState, DecodeStats]:
    """Step until every row is done, in one `lax.while_loop` on the device. `state` is donated.

    Each step adds a token to every live row or ends it, so the loop ends.

    Args:
      decoder, params: from `speculative_decoder`, and the weights.
      state: from `start`.
      record: also keep what each new token was: `DecodeStats.tokens`.
      max_steps: i32[]; stop after so many steps at most, so that somebody looks at the state and goes on with it. A
        value, so another number compiles nothing. None: no bound.

    Returns:
      The final state and the per-row counters of these steps.
    """

    def loop(given: tuple[Params, Any], state: DecodeState) -> tuple[DecodeState, DecodeStats]:
        params, most = given

        def body(carry: tuple[DecodeState, DecodeStats, Any]) -> tuple[DecodeState, DecodeStats, Any]:
            state, stats, left = carry
            state, info = decoder.step(params, state)
            with jax.named_scope("emit"):
                return state, accumulate(stats, info), None if left is None else left - 1

        def going(carry: tuple[DecodeState, DecodeStats, Any]) -> Array:
            live = ~jnp.all(carry[0].done)
            return live if carry[2] is None else live & (carry[2] > 0)

        batch, buffer = state.tokens.shape
        stats = zero_stats(batch, decoder.max_depth, record=buffer if record else None)
        return lax.while_loop(going, body, (state, stats, most))[:2]

    return by_rows(loop)((params, None if max_steps is None else jnp.asarray(max_steps, jnp.int32)), state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def jitted_step(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """`decoder.step`, compiled, with `state` donated."""
    return decoder.step(params, state)


AHEAD = 2
"""Steps that `stream` lets an accelerator be ahead of the flags that the host has read: one to compute while the host
is busy with an earlier one, and one more for when the host is late."""


def look_ahead(state: DecodeState) -> int:
    """How many steps may be on their way where this state is: none on a CPU.

    There a step is computed before the call returns, as measured with jax 0.10, so steps past the end would cost time
    and win none.
    """
    return 0 if next(iter(state.done.devices())).platform == "cpu" else AHEAD


def stream(
    decoder: Decoder, params: Params, state: DecodeState, *, ahead: int | None = None
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """The same step in a Python loop, yielding after each one. `state` is donated: use the one that is yielded.

    Whether all rows are done is read of a step that lies `ahead` steps back, so that the device computes while the host
    looks. So `ahead` steps more are yielded after the last row has ended; they emit nothing, and change no token,
    length, flag or rule. The number of steps depends on the tokens alone and not on time: processes that decode as one
    take the same.

    Args:
      decoder, params, state: as for `run`.
      ahead: 0 waits for each step before the next one, and yields none past the end; default `look_ahead(state)`.

    Raises:
      MarsError: `ahead` is below 0.
    """
    if ahead is None:
        ahead = look_ahead(state)
    if ahead < 0:
        raise MarsError(f"ahead is {ahead}: expected 0 or more steps.")
    flags = collections.deque([_all_done(state)])
    while len(flags) <= ahead or not bool(flags.popleft()):
        state, info = jitted_step(decoder, params, state)
        flags.append(_all_done(state))
        yield state, info


def _all_done(state: DecodeState) -> Array:
    """bool[], on its way to the host; an array of its own, since the next step takes the state's."""
    flag = jnp.all(state.done)
    flag.copy_to_host_async()
    return flag
