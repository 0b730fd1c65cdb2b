"""The parts of a step: propose, score_tree, judge, emit, commit. `Decoder.step` runs them in order.

All are pure functions. B batch, N nodes, D depth, T token buffer, V vocabulary. Oracles: greedy autoregression of the
same model, token for token (tests/core/test_decode.py), and a node-by-node `cut` in Python (tests/core/test_cut.py).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.conditions import Conditions, Nodes
from mars_jax.core.controls import is_stop
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.pick import append, in_rows, leading, pick
from mars_jax.core.rule import Evidence, decide, impossible
from mars_jax.core.sampling import at_tokens, log_probs, process, sample, top_log_probs
from mars_jax.core.tree import chain, step_tokens, visible
from mars_jax.core.trusted import judge_after_trusted
from mars_jax.core.types import (
    CORRECTED,
    EXACT,
    NO_KIND,
    NO_TOKEN,
    RELAXED,
    TRUSTED,
    Controls,
    DecodeState,
    DraftTree,
    ForwardOutput,
    LanguageModel,
    Params,
    PyTree,
    StepInfo,
    TopLogProbs,
    Verdict,
)


def step_keys(state: DecodeState) -> tuple[Array, Array]:
    """Return the keys of a step, (draft key[B], verify key[B]).

    The target's draws depend only on the position, so that a row produces the same tokens in any batch and under any
    deterministic draft. Draws of the draft differ in every step.
    """
    draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
    # The target's key is constant, and each draw folds in its position. The draft's key folds in the length, which
    # grows in every step of a live row, so that no two drafts share their noise.
    return jax.vmap(jax.random.fold_in)(draft_keys, state.length), verify_keys


def propose(
    drafter: Drafter, params: Params, state: DecodeState, conditions: Conditions, keys: Array
) -> tuple[DraftTree, PyTree]:
    """Return the draft under the last committed token, and the drafter's state after drafting it.

    A constraint edits the draft: forbidden tokens become padding, and forced tokens are filled in.

    Args:
      drafter, params, state: inputs of the step.
      conditions: conditions at the last committed tokens.
      keys: key[B]; keys for drawing the draft.
    """
    inputs = DraftInput(
        keys=keys,
        tokens=state.tokens,
        length=state.length,
        controls=state.controls,
        guide=conditions.constraint,
        hidden="draft_hidden" in state.rule.needs,
    )
    # The profiler and the planner find the parts of a step by these named scopes.
    with jax.named_scope("draft"):
        tree, draft = drafter.propose(params, state.draft, inputs)
        # Fill in forced tokens only for stateless drafters: a cache would miss tokens it did not draft.
        return conditions.steered(tree, fill=not jax.tree.leaves(draft)), draft


class Scores(NamedTuple):
    """The target's output over a tree."""

    output: ForwardOutput  # hidden states, features and cache
    raw: Array  # f32[B, N, V]; raw logits
    logits: Array  # f32[B, N, V]; after edits and constraints; the array `raw` if there are none


def score_tree(
    drafter: Drafter, target: LanguageModel, params: Params, state: DecodeState, tree: DraftTree, nodes: Nodes
) -> Scores:
    """Run one forward of the target over the tree: row i of the logits is p(. | the tokens up to node i).

    If a `sparse` drafter has drafted nothing in any row, a CPU forwards only the root, and the logits of the padding
    are 0. On an accelerator the padding costs next to nothing, so only the full forward is compiled.

    Args:
      drafter: the drafter of the tree.
      target, params, state: inputs of the step; the root is at `state.length - 1`, where the cache ends.
      tree: the draft.
      nodes: the conditions at the tree's nodes.
    """
    # The root, token `length - 1`, is committed but not cached: its forward writes its cache row and computes p(. |
    # committed tokens).
    root_position = state.length - 1

    def forward(tree: DraftTree) -> tuple[ForwardOutput, Array]:
        output = target.forward(params.target, tree.tokens, visible(tree, root_position), state.cache)
        return output, target.unembed(params.target, output.hidden)

    def forward_root() -> tuple[ForwardOutput, Array]:
        output, raw = forward(chain(tree.tokens[:, :1]))
        # Both branches of a cond must return the same shapes: pad [B, 1, ...] to [B, N, ...], where N = D + 1 since
        # the draft is a chain. The cache already has the full shape; only its row for the root is new.
        root_outputs = (output._replace(cache=()), raw)
        root_outputs = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, tree.max_depth), (0, 0))), root_outputs)
        return root_outputs[0]._replace(cache=output.cache), root_outputs[1]

    with jax.named_scope("target"):
        if drafter.sparse and tree.max_depth > 0:
            is_empty = ~jnp.any(tree.tokens[:, 1:] != NO_TOKEN)  # bool[], over all rows on this device
            output, raw = lax.platform_dependent(
                is_empty,
                cpu=lambda is_empty: lax.cond(is_empty, forward_root, lambda: forward(tree)),
                default=lambda _: forward(tree),
            )
        else:
            output, raw = forward(tree)
        return Scores(output, raw, nodes.on(raw, tree, state))


def judge(
    params: Params, state: DecodeState, tree: DraftTree, scores: Scores, nodes: Nodes, keys: Array
) -> tuple[Verdict, PyTree, Array | None]:
    """Decide how many drafted tokens to accept.

    Under `mars` this is Algorithm 1 of arXiv 2601.15498: `state.rule` walks down the tree using the target's logits.

    Args:
      params, state, tree, scores, nodes: inputs and intermediate results of the step.
      keys: key[B]; keys for drawing from the target.

    Returns:
      The verdict, the updated rule, and the number of trusted tokens, i32[B], or None if the drafter has no trusted
      nodes.
    """
    evidence = Evidence(
        keys=keys,
        start=state.length - 1,
        prompt_length=state.prompt_length,
        tree=tree,
        logits=scores.logits,
        hidden=scores.output.hidden,
        controls=state.controls,
        params=params.verify,
        strict_nodes=nodes.strict,
    )
    with jax.named_scope("verify"):
        num_trusted = None
        if tree.trusted is None:
            verdict, rule = decide(state.rule, evidence)
        else:
            verdict, rule, num_trusted = judge_after_trusted(state.rule, evidence)
        # Edits and a constraint may set logits to -inf. A lossless rule never accepts a token of probability 0, so only
        # lossy rules need the cut.
        if not state.rule.lossless and (nodes.edits is not None or nodes.constraint is not None):
            verdict = cut(verdict, evidence)
        return verdict, rule, num_trusted


def cut(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Truncate the verdict at the first `impossible` node, and draw the next token there from the target.

    Bans and constraints therefore hold under any rule, including randomized and user-written ones, and a step still
    adds a token. A `next_token` with a logit of -inf is also replaced by a draw from the target. Lossless rules choose
    no such node or token.
    """
    accepted, position = verdict.num_accepted, jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
    # Edge d leads from path[d] to path[d + 1]; only the first `accepted` of them were taken.
    is_wrong_edge = pick(impossible(evidence), verdict.path[:, 1:]) & (position[:, :-1] < accepted[:, None])
    num_accepted = jnp.minimum(leading(~is_wrong_edge), accepted)
    last = pick(verdict.path, num_accepted[:, None])  # i32[B, 1]
    # Draws are keyed by position, so this is the token that autoregression would draw there.
    target_token = sample(
        evidence.keys, pick(evidence.positions, last), pick(evidence.logits, last), evidence.controls
    )[:, 0]
    # A rule may choose a next token that the request forbids: its logit at the last node is -inf.
    is_forbidden = at_tokens(evidence.logits, last, verdict.next_token[:, None])[:, 0] == -jnp.inf
    return dataclasses.replace(
        verdict,
        path=jnp.where(position <= num_accepted[:, None], verdict.path, last),
        num_accepted=num_accepted,
        next_token=jnp.where((num_accepted < accepted) | is_forbidden, target_token, verdict.next_token),
        relaxed=verdict.relaxed & (position[:, :-1] < num_accepted[:, None]),
    )


def emit(
    state: DecodeState,
    tree: DraftTree,
    verdict: Verdict,
    logits: Array,
    decided: Array,
    trusted: Array | None = None,
    ended: Array | None = None,
    num_top: int = 0,
) -> tuple[DecodeState, StepInfo]:
    """Append the accepted path and `next_token`, cut at the first stop token and at the limit.

    Args:
      state: before the step.
      tree: the draft.
      verdict: the rule's verdict.
      logits: f32[B, N, V]; raw target logits.
      decided: f32[B, N, V]; target logits with edits and constraints, from which the rule decided.
      trusted: i32[B]; number of tokens accepted without a test, or None if the drafter has no trusted nodes.
      ended: bool[B]; the row's constraint allows no token after the path. None without a constraint.
      num_top: n of `StepInfo.top`; 0 for none.

    Returns:
      The state with the new tokens (its cache, draft and rule unchanged), and the `StepInfo`.
    """
    buffer = state.tokens.shape[1]
    # Entry d of `emitted` is the token after d accepted ones: D drafted tokens and `next_token` make D + 1.
    entry = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None]  # i32[1, D + 1]
    emitted = step_tokens(tree, verdict)

    # Broken weights produce a non-finite top logit. Stop the row instead of emitting token 0. Non-finite logits off the
    # accepted path are harmless: no decision depends on them.
    top_logit = pick(jnp.max(logits, axis=-1), verdict.path)  # f32[B, D + 1]
    is_broken = jnp.any(~jnp.isfinite(top_logit), axis=1) & ~state.done
    if state.controls.edits is not None:  # edits may ban every token
        top_decided = pick(jnp.max(decided, axis=-1), verdict.path)
        all_banned = jnp.any(~jnp.isfinite(top_decided), axis=1)
        # At the end of a constraint no token is allowed either, but that is not a failure.
        if ended is not None:
            all_banned &= ~ended
        is_broken |= all_banned & ~state.done

    # Never write past the end of the buffer, even if the limit is larger.
    free_slots = jnp.minimum(state.controls.limit, buffer) - state.length
    # `next_token` is entry `num_accepted`; later entries are padding.
    is_stop_entry = is_stop(emitted, state.controls.stop_tokens) & (entry <= verdict.num_accepted[:, None])
    # The number of tokens up to and including the first stop token; D + 1 if there is none.
    until_stop = jnp.min(jnp.where(is_stop_entry, entry + 1, entry.shape[1]), axis=1)
    num_emitted = jnp.minimum(jnp.minimum(verdict.num_accepted + 1, until_stop), free_slots)
    if ended is not None:  # the constraint allows no `next_token`
        num_emitted = jnp.where(ended, jnp.minimum(num_emitted, verdict.num_accepted), num_emitted)
    num_emitted = jnp.where(state.done | is_broken, 0, num_emitted)
    is_written = entry < num_emitted[:, None]
    tokens = append(state.tokens, state.length, emitted, num_emitted)
    length = state.length + num_emitted

    lossless = state.rule.lossless and trusted is None
    # Node d of the path predicts entry d: its row of logits is p(. | the tokens before that entry).
    emitted_logit = at_tokens(logits, verdict.path, jnp.maximum(emitted, 0))
    path_logits = path_decided = pick(logits, verdict.path)
    path_log_probs = log_probs(path_logits, emitted, state.controls, lossless)
    if decided is not logits:
        # Edits and constraints change the sampling distribution; the other log-probabilities stay those of the model.
        path_decided = pick(decided, verdict.path)
        decided_log_probs = log_probs(path_decided, emitted, state.controls, lossless)
        path_log_probs = path_log_probs._replace(processed_log_prob=decided_log_probs.processed_log_prob)
    top_tokens = None
    if num_top:
        top_tokens = _most_probable(path_logits, path_decided, state.controls, num_top, lossless, is_written)
    info = StepInfo(
        verdict=verdict,
        emitted=jnp.where(is_written, emitted, NO_TOKEN),
        num_emitted=num_emitted,
        num_proposed=jnp.sum(tree.tokens[:, 1:] != NO_TOKEN, axis=1, dtype=jnp.int32),
        kind=jnp.where(is_written, _kinds(verdict, entry, trusted), NO_KIND),
        regret=jnp.where(is_written, top_logit - emitted_logit, 0.0),
        **{name: jnp.where(is_written, value, 0.0) for name, value in path_log_probs._asdict().items()},
        top=top_tokens,
    )
    done = state.done | is_broken | jnp.any(is_stop_entry & is_written, axis=1)
    done |= length >= jnp.minimum(state.controls.limit, buffer)
    if ended is not None:
        done |= ended
    next_state = dataclasses.replace(
        state, tokens=tokens, length=length, done=done, failed=state.failed | is_broken
    )
    return next_state, info


def _most_probable(
    logits: Array, decided: Array, controls: Controls, count: int, lossless: bool, written: Array
) -> TopLogProbs:
    """Return the `count` most probable tokens at the nodes of the path, whose logits are f32[B, D + 1, V]."""
    tokens, log_prob = top_log_probs(logits, count)
    processed_tokens, processed_log_prob = top_log_probs(process(decided, controls), count)
    if not lossless:
        processed_log_prob = jnp.where(controls.strict[:, None, None], processed_log_prob, jnp.nan)

    def in_written(x: Array, fill: float) -> Array:
        return jnp.where(written[..., None], x, fill)

    return TopLogProbs(
        in_written(tokens, NO_TOKEN),
        in_written(log_prob, 0.0),
        in_written(processed_tokens, NO_TOKEN),
        in_written(processed_log_prob, 0.0),
    )


def _kinds(verdict: Verdict, place: Array, trusted: Array | None) -> Array:
    """Return i32[B, D + 1]: TRUSTED, then EXACT or RELAXED on the path, CORRECTED after it."""
    # Edge d of the D edges leads to entry d; the last entry has no edge, so it can only be CORRECTED.
    is_relaxed = jnp.pad(verdict.relaxed, ((0, 0), (0, 1)))
    draft_kind = jnp.where(is_relaxed, RELAXED, EXACT).astype(jnp.int32)
    if trusted is not None:
        draft_kind = jnp.where(place < trusted[:, None], TRUSTED, draft_kind)
    return jnp.where(place < verdict.num_accepted[:, None], draft_kind, CORRECTED)


def commit(
    target: LanguageModel,
    state: DecodeState,
    emitted: DecodeState,
    tree: DraftTree,
    verdict: Verdict,
    *,
    cache: PyTree,
    draft: PyTree,
    rule: PyTree,
    guides: PyTree,
) -> DecodeState:
    """Return the state after a step.

    Args:
      target: the owner of the cache; only trees have rows to move.
      state: before the step.
      emitted: from `emit`, with the new tokens.
      tree, verdict: the draft and its verdict.
      cache: after the forward.
      draft, rule, guides: after the verdict.
    """
    with jax.named_scope("commit"):
        # Node i of a chain is at depth i, so its row is already in place.
        if not tree.is_chain:
            cache = target.commit(cache, state.length - 1, verdict.path)
    # Rows that are done still run the step; their rule state must not change.
    rule = in_rows(state.done, state.rule, rule)
    return dataclasses.replace(emitted, cache=cache, draft=draft, rule=rule, guides=guides)
