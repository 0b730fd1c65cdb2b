"""`Retargeted`: the output follows the distribution that a rule names, against its exact joint distribution."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import verify
from mars_jax.core import tree as trees
from mars_jax.core.errors import MarsError
from tests.helpers import judge, rule_oracles
from tests.helpers.sampled_chains import sampled_chain

VOCAB, ROWS = 4, 18_000


@flax.struct.dataclass
class Lifted(verify.Retargeted):
    """The normalised max(p, share q)."""

    share: Any

    def target(self, log_p, log_q, evidence):
        return jnp.maximum(log_p, log_q + jnp.log(self.share)[:, None, None])


def lifted(p, q, share):
    """f64, along the last axis."""
    v = np.maximum(p, share * q)
    return v / v.sum(-1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True])
def test_the_output_follows_what_the_rule_names(block):
    """Every setting in one batch; the node after the draft has no q, and follows the target."""
    share = 0.9
    settings = rule_oracles.controls_of([rule_oracles.SETTINGS[b % 5] for b in range(ROWS)])
    p_table, q_table = rule_oracles.tables(41, VOCAB, 3), rule_oracles.tables(42, VOCAB, 2)
    tree, drafted = sampled_chain(rule_oracles.keys_of(1, ROWS), q_table, settings, ROWS)
    logits = jnp.asarray(np.stack([rule_oracles.after(p_table, drafted[:, :i]) for i in range(3)], 1))
    rule = Lifted(share=np.float32(share), block=block)
    verdict = jax.jit(judge(rule))(rule_oracles.keys_of(2, ROWS), tree, logits, settings)
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    for s, row in enumerate(rule_oracles.SETTINGS):
        p, q = rule_oracles.processed_tables(p_table, row), rule_oracles.processed_tables(q_table, row)
        named = [lifted(p[0], q[0], share), lifted(p[1], q[1], share), p[2]]
        assert np.abs(named[0] - p[0]).max() > 0.02  # another law than the target's
        sequences = rule_oracles.complete(np.random.default_rng(s), out[s::5], count[s::5], named)
        assert rule_oracles.chi_square(sequences, rule_oracles.sequence_probabilities(named)) > 1e-3, row


def test_strict_rows_follow_the_target():
    settings = rule_oracles.controls_of([rule_oracles.SETTINGS[0]] * ROWS, strict=True)
    p_table, q_table = rule_oracles.tables(41, VOCAB, 3), rule_oracles.tables(42, VOCAB, 2)
    tree, drafted = sampled_chain(rule_oracles.keys_of(1, ROWS), q_table, settings, ROWS)
    logits = jnp.asarray(np.stack([rule_oracles.after(p_table, drafted[:, :i]) for i in range(3)], 1))
    rule = jax.jit(judge(Lifted(share=np.float32(0.9))))
    verdict = rule(rule_oracles.keys_of(2, ROWS), tree, logits, settings)
    p = rule_oracles.processed_tables(p_table, rule_oracles.SETTINGS[0])
    sequences = rule_oracles.complete(
        np.random.default_rng(0), *rule_oracles.emitted(tree.tokens, verdict), p
    )
    assert rule_oracles.chi_square(sequences, rule_oracles.sequence_probabilities(p)) > 1e-3


def test_a_tree_is_refused_and_a_rule_that_names_nothing():
    tree = trees.chain(jnp.zeros((1, 3), jnp.int32))
    rows = rule_oracles.controls_of([(1.0, 0, 1.0, 0.0)])
    with pytest.raises(MarsError, match="lifted asks what a tree was drawn from"):
        judge(Lifted(share=np.float32(1)))(
            rule_oracles.keys_of(0, 1), tree.replace(is_chain=False), jnp.zeros((1, 3, 4)), rows
        )
    with pytest.raises(MarsError, match="says nothing: give it a method target"):
        judge(verify.Retargeted())(rule_oracles.keys_of(0, 1), tree, jnp.zeros((1, 3, 4)), rows)
