"""Verification of drafts whose first tokens are trusted, that is, accepted without verification.

Dimensions: B batch, N nodes, V vocabulary. Tested against a Python loop over the same models
(tests/contrib/test_cascade.py).

A rule never verifies trusted tokens. The evidence that it receives begins after them, as if they were already
committed. All rules, with their guards and states, therefore work unchanged, and the probability ratios of rejection
sampling and block verification begin after the trusted tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.controls import is_stop
from mars_jax.core.pick import leading, pick
from mars_jax.core.rule import Evidence, Rule, check_array, decide, user_errors
from mars_jax.core.sampling import at_drafted
from mars_jax.core.tree import at_parent
from mars_jax.core.types import NO_TOKEN, DraftTree, Verdict
from mars_jax.utils.errors import MarsError


def count_trusted(evidence: Evidence, rule: Rule) -> Array:
    """Count the trusted tokens that will be accepted in each row, i32[B].

    The count is 0 in strict rows and within the rule's `exact_prefix`. Otherwise the trusted prefix of the draft ends
    before the first untrusted node, stop token (which only the target may emit) or forbidden token.
    """
    tree = evidence.tree
    assert tree.trusted is not None
    # bool[B, N]; the root is committed and is not counted.
    is_trusted = tree.trusted & (tree.tokens >= 0) & ~is_stop(tree.tokens, evidence.controls.stop_tokens)
    is_trusted &= at_drafted(tree, evidence.logits) > -jnp.inf
    if evidence.strict_nodes is not None:
        is_trusted &= ~at_parent(tree, evidence.strict_nodes)
    with user_errors(rule):
        strict_edges = rule.strict_edges(evidence)
    check_array(rule, "strict_edges", strict_edges, "int32", tree.tokens.shape[:1])
    return jnp.where(evidence.controls.strict | (strict_edges > 0), 0, leading(is_trusted[:, 1:]))


def judge_after_trusted(rule: Rule, evidence: Evidence) -> tuple[Verdict, Rule, Array]:
    """Accept the trusted tokens, and let the rule verify the tokens after them.

    Returns:
      The verdict on the whole draft, the updated rule, and the number of trusted tokens i32[B].

    Raises:
      MarsError: the draft is not a chain, or the verdict is an instance of a subclass of `Verdict`.
    """
    tree = evidence.tree
    if not tree.is_chain:
        raise MarsError("a draft with trusted tokens is a tree: trust tokens of chains only.")
    count = count_trusted(evidence, rule)
    verdict, rule = decide(rule, _after_trusted(evidence, count))
    if type(verdict) is not Verdict:
        raise MarsError(
            f"the rule returns a {type(verdict).__name__}, whose extra arrays cannot be shifted past trusted tokens: "
            "return a plain Verdict, or use a drafter without trust."
        )
    num_accepted = count + verdict.num_accepted
    # Edge d of the whole draft is edge d - count of the draft that the rule verified. The first `count` edges are
    # trusted and not relaxed.
    edge = jnp.arange(tree.max_depth, dtype=jnp.int32)[None] - count[:, None]
    relaxed = pick(verdict.relaxed, jnp.maximum(edge, 0)) & (edge >= 0)
    # In a chain, node d is at depth d. Entries past the end of the path repeat its last node.
    path = jnp.minimum(jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None], num_accepted[:, None])
    return dataclasses.replace(verdict, path=path, num_accepted=num_accepted, relaxed=relaxed), rule, count


def _after_trusted(evidence: Evidence, count: Array) -> Evidence:
    """Shift the evidence of each row by `count` nodes, so that the last trusted node becomes the root."""
    tree = evidence.tree
    # i32[B, N]: node i of the shifted tree is node i + count of the original tree. Arrays keep their shapes, because
    # counts differ between rows. Nodes past the end become padding, and the values gathered for them are never read.
    source_node = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None] + count[:, None]
    last_node = tree.tokens.shape[1] - 1

    def shift(values: Array) -> Array:
        return pick(values, jnp.minimum(source_node, last_node))

    shifted_tree: DraftTree = dataclasses.replace(
        tree,
        tokens=jnp.where(source_node <= last_node, shift(tree.tokens), NO_TOKEN),
        # `jax.tree.map` leaves None unchanged.
        draft_logits=jax.tree.map(shift, tree.draft_logits),
        trusted=None,
    )
    return dataclasses.replace(
        evidence,
        tree=shifted_tree,
        start=evidence.start + count,
        logits=shift(evidence.logits),
        hidden=shift(evidence.hidden),
        strict_nodes=jax.tree.map(shift, evidence.strict_nodes),
    )
