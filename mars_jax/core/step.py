"""The five parts of a step: propose, score, judge, emit, commit. `Decoder.step` runs them in order.

All are pure functions; `emit` has its own module. B batch, N nodes, D depth, V vocabulary. Oracle: greedy
autoregression of the same model, token for token (tests/core/test_decode.py).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.conditions import Conditions, Nodes
from mars_jax.core.cut import cut
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import in_rows
from mars_jax.core.rule import decide
from mars_jax.core.tree import chain, visible
from mars_jax.core.trusted import judged
from mars_jax.core.types import (
    NO_TOKEN,
    DecodeState,
    DraftTree,
    ForwardOutput,
    LanguageModel,
    Params,
    PyTree,
    Verdict,
)


def step_keys(state: DecodeState) -> tuple[Array, Array]:
    """Return the keys of a step, (draft key[B], verify key[B]).

    Draws of the target depend only on the position, so that a row gives the same text in any batch and under any
    deterministic draft. Draws of the draft are fresh in every step.
    """
    draft, verify = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
    # The target's key is constant, and each draw folds in its position. The draft's key folds in the length, which
    # grows in every step of a live row, so that no two drafts share their noise.
    return jax.vmap(jax.random.fold_in)(draft, state.length), verify


def propose(
    drafter: Drafter, params: Params, state: DecodeState, conditions: Conditions, keys: Array
) -> tuple[DraftTree, PyTree]:
    """Return the draft under the last committed token, and the drafter's state after drafting it.

    A constraint edits the draft: forbidden tokens become padding, and forced tokens are filled in.

    Args:
      drafter, params, state: of the step.
      conditions: at the last committed tokens.
      keys: key[B]; of the draft.
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
    logits: Array  # f32[B, N, V]; with edits and constraints; `raw` itself if there are none


def score(
    drafter: Drafter, target: LanguageModel, params: Params, state: DecodeState, tree: DraftTree, nodes: Nodes
) -> Scores:
    """Run one forward of the target over the tree: row i of the logits is p(. | the text up to node i).

    If a `sparse` drafter has drafted nothing in any row, a CPU forwards only the root, and the logits of the padding
    are 0. On an accelerator the padding costs next to nothing, so only the full forward is compiled.

    Args:
      drafter: the drafter of the tree.
      target, params, state: of the step; the root is at `state.length - 1`, where the cache ends.
      tree: the draft.
      nodes: the conditions at its nodes.
    """
    # The root, token `length - 1`, is committed but not cached: its forward writes its row and gives p(. | text).
    start = state.length - 1

    def forward(tree: DraftTree) -> tuple[ForwardOutput, Array]:
        output = target.forward(params.target, tree.tokens, visible(tree, start), state.cache)
        return output, target.unembed(params.target, output.hidden)

    def forward_root() -> tuple[ForwardOutput, Array]:
        output, raw = forward(chain(tree.tokens[:, :1]))
        # Both branches of a cond must return the same shapes: pad [B, 1, ...] to [B, N, ...], where N = D + 1 since
        # the draft is a chain. The cache already has its shape; only the root's row in it is new.
        padded = (output._replace(cache=()), raw)
        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, tree.max_depth), (0, 0))), padded)
        return padded[0]._replace(cache=output.cache), padded[1]

    with jax.named_scope("target"):
        if drafter.sparse and tree.max_depth > 0:
            is_empty = ~jnp.any(tree.tokens[:, 1:] != NO_TOKEN)  # bool[], over all rows of this device
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

    Under `mars` this is Algorithm 1 of arXiv 2601.15498: `state.rule` walks down the tree by the target's logits.

    Args:
      params, state, tree, scores, nodes: of the step.
      keys: key[B]; of the target.

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
        trusted = None
        if tree.trusted is None:
            verdict, rule = decide(state.rule, evidence)
        else:
            verdict, rule, trusted = judged(state.rule, evidence)
        # A lossless rule never accepts a token of probability 0, so only lossy rules need the cut.
        if nodes.forbid and not state.rule.lossless:
            verdict = cut(verdict, evidence)
        return verdict, rule, trusted


def commit(
    target: LanguageModel,
    state: DecodeState,
    emitted: DecodeState,
    tree: DraftTree,
    verdict: Verdict,
    **parts: PyTree,
) -> DecodeState:
    """Return the state after a step.

    Args:
      target: the owner of the cache; only a tree has rows to move.
      state: before the step.
      emitted: from `emit`, with the new tokens.
      tree, verdict: of the step.
      **parts: `cache` after the forward, and `draft`, `rule` and `guides` after the verdict.
    """
    with jax.named_scope("commit"):
        # Node i of a chain is at depth i, so its row is already in place.
        if not tree.is_chain:
            parts["cache"] = target.commit(parts["cache"], state.length - 1, verdict.path)
    # Rows that are done still run the step; their rule state must not change.
    parts["rule"] = in_rows(state.done, state.rule, parts["rule"])
    return dataclasses.replace(emitted, **parts)
