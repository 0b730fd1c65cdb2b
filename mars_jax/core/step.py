"""The parts of a decoding step: propose, score_tree, judge, emit and commit, which `Decoder.step` calls in this order.

All of these functions are pure. Dimensions: B batch, N nodes, D draft depth, T token buffer, V vocabulary. Tested token
by token against greedy autoregression of the same model (tests/core/test_decode.py), and against a version of `cut`
that loops over the nodes in Python (tests/core/test_cut.py).
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
    """Return the PRNG keys of a step: one per row for drafting and one per row for verification, key[B] each.

    Random numbers for verification depend only on the position, so that a row produces the same tokens in any batch and
    with any deterministic draft. Random numbers for drafting differ in every step.
    """
    draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
    # The verification key is constant, and each draw folds in its position. The draft key folds in the length, which
    # grows in every step of an unfinished row, so that no two drafts use the same random numbers.
    return jax.vmap(jax.random.fold_in)(draft_keys, state.length), verify_keys


def propose(
    drafter: Drafter, params: Params, state: DecodeState, conditions: Conditions, keys: Array
) -> tuple[DraftTree, PyTree]:
    """Draft a tree below the last committed token, and return it with the drafter's new state.

    If there is a constraint, forbidden tokens become padding, and forced tokens are filled in.

    Args:
      drafter, params, state: the drafter, the weights and the state before the step.
      conditions: the edits, constraint and span of every row.
      keys: key[B]; PRNG keys for drafting.
    """
    inputs = DraftInput(
        keys=keys,
        tokens=state.tokens,
        length=state.length,
        controls=state.controls,
        guide=conditions.constraint,
        hidden="draft_hidden" in state.rule.needs,
    )
    # The profiler and the planner identify the parts of a step by these named scopes.
    with jax.named_scope("draft"):
        tree, draft = drafter.propose(params, state.draft, inputs)
        # Fill in forced tokens only for stateless drafters, because a drafter's cache lacks tokens that it did not
        # draft.
        return conditions.steered(tree, fill=not jax.tree.leaves(draft)), draft


class Scores(NamedTuple):
    """The target's output at the nodes of a draft tree."""

    output: ForwardOutput  # hidden states, features and cache
    raw: Array  # f32[B, N, V]; raw logits
    logits: Array  # f32[B, N, V]; after edits and constraints; the same array as `raw` if there are none


def score_tree(
    drafter: Drafter, target: LanguageModel, params: Params, state: DecodeState, tree: DraftTree, nodes: Nodes
) -> Scores:
    """Run one forward pass of the target over a draft tree. Row i of the logits is p(. | tokens up to node i).

    If a `sparse` drafter has drafted no tokens in any row, a CPU evaluates only the root, and the logits of padding are
    0. On an accelerator the padding costs almost nothing, so only the full forward pass is compiled.

    Args:
      drafter: the drafter that drafted the tree.
      target, params, state: the target, the weights and the state before the step. The root is at `state.length - 1`,
        the first position that is not cached.
      tree: the draft.
      nodes: the conditions at the nodes of the tree.
    """
    # The root is committed but not cached. This forward pass writes its cache row and computes p(. | committed tokens).
    root_position = state.length - 1

    def forward(tree: DraftTree) -> tuple[ForwardOutput, Array]:
        output = target.forward(params.target, tree.tokens, visible(tree, root_position), state.cache)
        return output, target.unembed(params.target, output.hidden)

    def forward_root() -> tuple[ForwardOutput, Array]:
        output, raw = forward(chain(tree.tokens[:, :1]))
        # Both branches of a `cond` must return the same shapes, so pad [B, 1, ...] to [B, N, ...]. N is D + 1, because
        # the draft is a chain. The cache already has the full shape, and only the root's slot in it has changed.
        root_outputs = (output._replace(cache=()), raw)
        root_outputs = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, tree.max_depth), (0, 0))), root_outputs)
        return root_outputs[0]._replace(cache=output.cache), root_outputs[1]

    with jax.named_scope("target"):
        if drafter.sparse and tree.max_depth > 0:
            # bool[]; True if no row on this device has a draft.
            is_empty = ~jnp.any(tree.tokens[:, 1:] != NO_TOKEN)
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
    """Apply the rule to a draft, and return its verdict on which tokens to accept.

    For the rule `mars`, this step is Algorithm 1 of arXiv 2601.15498, which walks down the tree using the target's
    logits.

    Args:
      params, state, tree, scores, nodes: the weights, the state before the step, the draft, the target's output, and
        the conditions at the nodes.
      keys: key[B]; PRNG keys for verification.

    Returns:
      The verdict, the updated rule, and the number of trusted tokens that were accepted, i32[B], or None if the drafter
      does not mark trusted nodes.
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
        # Edits and constraints may set logits to -inf. A lossless rule never accepts a token of probability 0, so only
        # the verdicts of lossy rules need to be truncated.
        if not state.rule.lossless and (nodes.edits is not None or nodes.constraint is not None):
            verdict = cut(verdict, evidence)
        return verdict, rule, num_trusted


def cut(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Truncate a verdict before the first forbidden token, and sample the next token from the target instead.

    Bans and constraints therefore hold for all rules, including randomised rules and users' own, and every step still
    adds at least one token. A `next_token` with a logit of -inf is also replaced by a sample from the target. Lossless
    rules never choose such nodes or tokens.
    """
    accepted, position = verdict.num_accepted, jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
    # Edge d leads from path[d] to path[d + 1]. The rule accepted only the first `accepted` edges.
    is_wrong_edge = pick(impossible(evidence), verdict.path[:, 1:]) & (position[:, :-1] < accepted[:, None])
    num_accepted = jnp.minimum(leading(~is_wrong_edge), accepted)
    last = pick(verdict.path, num_accepted[:, None])  # i32[B, 1]
    # Random numbers depend on the position, so this is the token that autoregression would sample there.
    target_token = sample(
        evidence.keys, pick(evidence.positions, last), pick(evidence.logits, last), evidence.controls
    )[:, 0]
    # True if the rule chose a next token that the request forbids, that is, one with a logit of -inf at the last node.
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
    """Append the accepted tokens and `next_token` to each row, up to the first stop token and the limit.

    Args:
      state: the state before the step.
      tree: the draft.
      verdict: the rule's verdict on the draft.
      logits: f32[B, N, V]; the target's raw logits.
      decided: f32[B, N, V]; the logits that the rule used: the target's, after edits and constraints.
      trusted: i32[B]; number of accepted trusted tokens, or None if the drafter does not mark trusted nodes.
      ended: bool[B]; True if the row's constraint allows no token after the accepted path. None without a constraint.
      num_top: number of most probable tokens in `StepInfo.top`; 0 for none.

    Returns:
      The state with the new tokens but the old cache, drafter state and rule, and the `StepInfo`.
    """
    buffer = state.tokens.shape[1]
    # Entry d of `emitted` follows d accepted tokens. There are D + 1 entries: at most D drafted tokens, and
    # `next_token`.
    entry = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None]  # i32[1, D + 1]
    emitted = step_tokens(tree, verdict)

    # Broken weights produce a non-finite largest logit. Stop the row instead of emitting token 0. Non-finite logits off
    # the accepted path are harmless, because no decision depends on them.
    top_logit = pick(jnp.max(logits, axis=-1), verdict.path)  # f32[B, D + 1]
    is_broken = jnp.any(~jnp.isfinite(top_logit), axis=1) & ~state.done
    if state.controls.edits is not None:  # edits may ban every token
        top_decided = pick(jnp.max(decided, axis=-1), verdict.path)
        all_banned = jnp.any(~jnp.isfinite(top_decided), axis=1)
        # After the end of a constraint, no token is allowed. This is not a failure.
        if ended is not None:
            all_banned &= ~ended
        is_broken |= all_banned & ~state.done

    # Never write past the end of the buffer, even if the limit is larger.
    free_slots = jnp.minimum(state.controls.limit, buffer) - state.length
    # `next_token` is entry `num_accepted`. Later entries are padding.
    is_stop_entry = is_stop(emitted, state.controls.stop_tokens) & (entry <= verdict.num_accepted[:, None])
    # The number of entries up to and including the first stop token; D + 1 if there is none.
    until_stop = jnp.min(jnp.where(is_stop_entry, entry + 1, entry.shape[1]), axis=1)
    num_emitted = jnp.minimum(jnp.minimum(verdict.num_accepted + 1, until_stop), free_slots)
    if ended is not None:  # the constraint allows no `next_token`
        num_emitted = jnp.where(ended, jnp.minimum(num_emitted, verdict.num_accepted), num_emitted)
    num_emitted = jnp.where(state.done | is_broken, 0, num_emitted)
    is_written = entry < num_emitted[:, None]
    tokens = append(state.tokens, state.length, emitted, num_emitted)
    length = state.length + num_emitted

    lossless = state.rule.lossless and trusted is None
    # Node d of the path predicts entry d, so its row of logits is p(. | tokens before entry d).
    emitted_logit = at_tokens(logits, verdict.path, jnp.maximum(emitted, 0))
    path_logits = path_decided = pick(logits, verdict.path)
    path_log_probs = log_probs(path_logits, emitted, state.controls, lossless)
    if decided is not logits:
        # Edits and constraints affect only `processed_log_prob`. The other log-probabilities are those of the unedited
        # model.
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
    """Return the `count` most probable tokens at each node of the path, given the logits f32[B, D + 1, V]."""
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
    """Return the kinds of emitted tokens, i32[B, D + 1]: TRUSTED, EXACT or RELAXED on the path, then CORRECTED."""
    # Edge d leads to entry d. There are D edges, so the last entry has no edge and can only be CORRECTED.
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
    """Assemble the state after a step, and move the cache rows of the accepted path.

    Args:
      target: the target, whose `commit` moves the cache rows.
      state: the state before the step.
      emitted: the state that `emit` returned, with the new tokens.
      tree, verdict: the draft and its verdict.
      cache: the target's cache after the forward pass.
      draft, rule, guides: the states of the drafter, rule and automata after the verdict.
    """
    with jax.named_scope("commit"):
        # In a chain, node i is at depth i, so its cache row is already in place.
        if not tree.is_chain:
            cache = target.commit(cache, state.length - 1, verdict.path)
    # Finished rows still take part in the step, but their rule state must not change.
    rule = in_rows(state.done, state.rule, rule)
    return dataclasses.replace(emitted, cache=cache, draft=draft, rule=rule, guides=guides)
