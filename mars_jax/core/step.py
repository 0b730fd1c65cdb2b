"""The five parts of a step: propose, score, judge, emit, commit. `Decoder.step` is these in a row; `emit` has a module.

Each is a pure function. B batch, N nodes, D depth, V vocabulary. Oracle: greedy
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
from mars_jax.core.drafter import SPARSE, Drafter, DraftInput
from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import in_rows
from mars_jax.core.rule import decide, facts
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
    """(draft, verify): the keys key[B] of a step.

    Draws of the target depend on the position alone, so that a row gives the same text alone, in any batch, and after
    any deterministic draft. A draft's own draws are fresh in every step.
    """
    draft, verify = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
    # The target's key stays as it is, and every draw folds its position in. The draft's is folded with the length,
    # which grows in every step of a live row, so that no two drafts share their noise.
    return jax.vmap(jax.random.fold_in)(draft, state.length), verify


def propose(
    drafter: Drafter, params: Params, state: DecodeState, conditions: Conditions, keys: Array
) -> tuple[DraftTree, PyTree]:
    """The draft under the last committed token, and the drafter's state after drafting it.

    A constraint steers the draft: what it forbids becomes padding, and what it forces is put in.

    Args:
      drafter, params, state: of the step.
      conditions: as the rows stand.
      keys: key[B]; the draft's own.
    """
    given = DraftInput(
        keys=keys,
        tokens=state.tokens,
        length=state.length,
        controls=state.controls,
        guide=conditions.constraint,
        hidden="draft_hidden" in facts(state.rule).needs,
    )
    # The names are what a profiler and the planner see of the step; they change nothing in the program.
    with jax.named_scope("draft"):
        tree, draft = drafter.propose(params, state.draft, given)
        # What a drafter with a cache has not drafted itself, its cache would not have.
        return conditions.steered(tree, fill=not jax.tree.leaves(draft)), draft


class Scores(NamedTuple):
    """The target's output over a tree."""

    output: ForwardOutput  # its hidden states, features and cache
    raw: Array  # f32[B, N, V]; its logits
    logits: Array  # f32[B, N, V]; as the requests asked for: edited and constrained. The same array where none did


def score(
    drafter: Drafter, target: LanguageModel, params: Params, state: DecodeState, tree: DraftTree, nodes: Nodes
) -> Scores:
    """One forward of the target over the tree: row i of the logits is p(. | the text up to node i).

    Where a drafter that often drafts nothing has drafted nothing in any row, a CPU forwards the root alone, and the
    logits of the padding are 0. On an accelerator some nodes more cost next to nothing, and there one form is compiled.

    Args:
      drafter: whose tree it is.
      target, params, state: of the step; the root is at `state.length - 1`, where the cache ends.
      tree: the draft.
      nodes: the conditions there.
    """
    # The root, token `length - 1`, is committed and in no cache yet: its forward writes its row and gives p(. | text).
    start = state.length - 1

    def over(tree: DraftTree) -> tuple[ForwardOutput, Array]:
        output = target.forward(params.target, tree.tokens, visible(tree, start), state.cache)
        return output, target.unembed(params.target, output.hidden)

    def of_root() -> tuple[ForwardOutput, Array]:
        output, raw = over(chain(tree.tokens[:, :1]))
        # Both branches of a cond give the same shapes: [B, 1, ...] becomes [B, N, ...], N = D + 1 as the draft is a
        # chain. The cache has its shape already, and in it only the root's row is new.
        wide = (output._replace(cache=()), raw)
        wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, tree.max_depth), (0, 0))), wide)
        return wide[0]._replace(cache=output.cache), wide[1]

    with jax.named_scope("target"):
        if SPARSE in drafter.traits and tree.max_depth > 0:
            nothing = ~jnp.any(tree.tokens[:, 1:] != NO_TOKEN)  # bool[], over all rows of this device
            output, raw = lax.platform_dependent(
                nothing,
                cpu=lambda nothing: lax.cond(nothing, of_root, lambda: over(tree)),
                default=lambda _: over(tree),
            )
        else:
            output, raw = over(tree)
        return Scores(output, raw, nodes.on(raw, tree, state))


def judge(
    params: Params, state: DecodeState, tree: DraftTree, scores: Scores, nodes: Nodes, keys: Array
) -> tuple[Verdict, PyTree, Array | None]:
    """Decide how far down the tree the text goes.

    Under `mars` this is Algorithm 1 of arXiv 2601.15498: `state.rule` sees the logits, and walks.

    Args:
      params, state, tree, scores, nodes: of the step.
      keys: key[B]; the target's own.

    Returns:
      The verdict, the rule after it, and the number of tokens taken on trust: i32[B], or None where the drafter asks
      for no trust.
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
        # A lossless rule gives a token of probability 0 no chance, so only a lossy one has to be cut.
        if nodes.forbid and not facts(state.rule).lossless:
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
    """The state after a step.

    Args:
      target: whose cache it is; a tree has rows to move, a chain has none.
      state: before the step.
      emitted: from `emit`, with the new tokens.
      tree, verdict: of the step.
      **parts: `cache` after the forward, and `draft`, `rule` and `guides` after the verdict.
    """
    with jax.named_scope("commit"):
        # Node i of a chain is at depth i, so its row is where it belongs already.
        if not tree.is_chain:
            parts["cache"] = target.commit(parts["cache"], state.length - 1, verdict.path)
    # Rows that are done still step; what a rule keeps for them must not move.
    parts["rule"] = in_rows(state.done, state.rule, parts["rule"])
    return dataclasses.replace(emitted, **parts)
