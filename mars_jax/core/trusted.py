"""Drafts that vouch for their own beginning: trusted tokens are taken without a test, and rules see what comes after.

B batch, N nodes, V vocabulary. Oracle: a loop in Python over the same models in tests/contrib/test_cascade.py.

A rule never sees a trusted token. It gets the step as if the row had them committed already, so that every rule, its
guards and its state hold for what comes after, and the ratios of rejection and blocks start there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core.controls import is_stop
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import leading, pick
from mars_jax.core.rule import check_array, decide, facts, user_errors
from mars_jax.core.sampling import at_drafted
from mars_jax.core.tree import at_parent
from mars_jax.core.types import NO_TOKEN, DraftTree, Verdict


def count_of(evidence: Evidence, rule: Any) -> Array:
    """i32[B]: the tokens that are taken without a test.

    None in strict rows, nor while the rule's `exact_prefix` lasts; and none from the first stop token on, which is the
    target's to say, nor from a token that the request forbids. Trust is a beginning: it ends at the first node that is
    not trusted.
    """
    tree = evidence.tree
    assert tree.trusted is not None
    # bool[B, N]; the root is committed and not counted.
    trusted = tree.trusted & (tree.tokens >= 0) & ~is_stop(tree.tokens, evidence.controls.stop_tokens)
    trusted &= at_drafted(tree, evidence.logits) > -jnp.inf
    if evidence.strict_nodes is not None:
        trusted &= ~at_parent(tree, evidence.strict_nodes)
    with user_errors(rule):
        strict = facts(rule).strict_edges(evidence)
    check_array(rule, "strict_edges", strict, "int32", tree.tokens.shape[:1])
    return jnp.where(evidence.controls.strict | (strict > 0), 0, leading(trusted[:, 1:]))


def judged(rule: Any, evidence: Evidence) -> tuple[Verdict, Any, Array]:
    """The verdict of a rule on what comes after the trusted tokens, as one on the whole draft; the rule, which may have
    kept state; and how many tokens were trusted, i32[B].

    Raises:
      MarsError: trust in a tree that is no chain, or a verdict with arrays of its own.
    """
    tree = evidence.tree
    if not tree.is_chain:
        raise MarsError("a draft with trusted tokens is a tree: trust tokens of chains only.")
    count = count_of(evidence, rule)
    found, rule = decide(rule, _after(evidence, count))
    if type(found) is not Verdict:
        raise MarsError(
            f"the rule returns a {type(found).__name__}, whose extra arrays cannot be shifted past trusted tokens: "
            "return a plain Verdict, or use a drafter without trust."
        )
    accepted = count + found.num_accepted
    # Edge d of the whole draft is edge d - count of what the rule saw. The first `count` edges are trusted instead.
    edge = jnp.arange(tree.max_depth, dtype=jnp.int32)[None] - count[:, None]
    relaxed = pick(found.relaxed, jnp.maximum(edge, 0)) & (edge >= 0)
    # The draft is a chain: node d is at depth d, and past its end the path repeats its last node.
    path = jnp.minimum(jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None], accepted[:, None])
    return dataclasses.replace(found, path=path, num_accepted=accepted, relaxed=relaxed), rule, count


def _after(evidence: Evidence, count: Array) -> Evidence:
    """The evidence from the last trusted node on, as the root."""
    tree = evidence.tree
    # i32[B, N]: node i of what the rule sees is node i + count. Rows of one batch trust different counts, so shapes
    # stay as they are, and nodes past the end become padding; what is gathered for them is never read.
    place = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None] + count[:, None]
    last = tree.tokens.shape[1] - 1

    def moved(values: Array) -> Array:
        return pick(values, jnp.minimum(place, last))

    after: DraftTree = dataclasses.replace(
        tree,
        tokens=jnp.where(place <= last, moved(tree.tokens), NO_TOKEN),
        draft_logits=None if tree.draft_logits is None else moved(tree.draft_logits),
        trusted=None,
    )
    return dataclasses.replace(
        evidence,
        tree=after,
        start=evidence.start + count,
        logits=moved(evidence.logits),
        hidden=moved(evidence.hidden),
        strict_nodes=None if evidence.strict_nodes is None else moved(evidence.strict_nodes),
    )
