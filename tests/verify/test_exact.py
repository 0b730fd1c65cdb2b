"""`exact`: lossless over deterministic chains and trees, with repeated siblings and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core import sampling
from mars_jax.core import tree as trees
from mars_jax.core.types import NO_TOKEN, DraftTree
from mars_jax.verify import exact, mars, rejection
from tests.helpers import judge, rule_oracles, slow_but
from tests.helpers.random_trees import B, N, V, random_tree

ROWS = 12_000
VOCAB = 4


def fixed_tree(tokens, parents, is_chain=False) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    arrays = {"tokens": tokens, "parents": parents, "depths": depths}
    arrays = {
        name: jnp.tile(jnp.asarray(value, jnp.int32)[None], (ROWS, 1)) for name, value in arrays.items()
    }
    return DraftTree(**arrays, max_depth=max(depths), is_chain=is_chain)


TREES = {
    "chain": fixed_tree([0, 1, 2], [-1, 0, 1], is_chain=True),
    "short chain": fixed_tree([0, 1, NO_TOKEN], [-1, 0, 1], is_chain=True),
    "tree": fixed_tree([0, 1, 3, 0, 2, 3], [-1, 0, 0, 1, 1, 2]),
    "tree with a repeated sibling and padding": fixed_tree([0, 2, 2, 1, NO_TOKEN, 3], [-1, 0, 0, 1, 1, 2]),
}


@pytest.mark.parametrize("name", slow_but(TREES, "chain", "tree with a repeated sibling and padding"))
def test_exact_leaves_the_target_distribution(name):
    """Every fifth row has the same settings, and all rows share one compilation."""
    tree = TREES[name]
    rows = [rule_oracles.SETTINGS[b % len(rule_oracles.SETTINGS)] for b in range(ROWS)]
    table = rule_oracles.tables(11, VOCAB, 3)
    nodes = []  # the target's logits at each node; the tree is the same in every row
    for i in range(tree.tokens.shape[1]):
        prefix, node = [], i
        while node > 0:
            prefix, node = [max(int(tree.tokens[0, node]), 0), *prefix], int(tree.parents[0, node])
        nodes.append(rule_oracles.after(table, np.asarray([prefix], int).reshape(1, -1))[0])
    logits = jnp.tile(jnp.asarray(np.stack(nodes))[None], (ROWS, 1, 1))
    controls = rule_oracles.controls_of(rows)
    verdict = jax.jit(judge(exact()))(rule_oracles.keys_of(5, ROWS), tree, logits, controls)
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    for s, row in enumerate(rule_oracles.SETTINGS):
        pick = slice(s, None, len(rule_oracles.SETTINGS))
        p = rule_oracles.processed_tables(table, row)
        sequences = rule_oracles.complete(np.random.default_rng(s), out[pick], count[pick], p)
        assert rule_oracles.chi_square(sequences, rule_oracles.sequence_probabilities(p)) > 1e-3, row


def test_exact_walks_where_the_sample_of_each_node_leads():
    """The verdict equals a Python walk over `sample`, with greedy and sampled rows mixed."""
    tree = random_tree(np.random.default_rng(1))
    logits = jax.random.normal(jax.random.key(1), (B, N, V))
    settings = rule_oracles.controls_of([(0.0 if b % 2 else 0.8, 0, 1.0, 0.0) for b in range(B)])
    verdict = jax.jit(judge(exact()))(rule_oracles.keys_of(0, B), tree, logits, settings)
    y = np.asarray(jax.jit(sampling.sample)(rule_oracles.keys_of(0, B), tree.depths, logits, settings))
    np.testing.assert_array_equal(y[1::2], np.argmax(logits, -1)[1::2])
    for b in range(B):
        node, path = 0, [0]
        while children := [
            i for i in range(N) if tree.parents[b, i] == node and tree.tokens[b, i] == y[b, node]
        ]:
            node = children[0]
            path.append(node)
        assert verdict.path[b].tolist() == path + [node] * (tree.max_depth + 1 - len(path))
        assert int(verdict.num_accepted[b]) == len(path) - 1 and int(verdict.next_token[b]) == y[b, node]


@pytest.mark.parametrize("rule", [exact(), rejection(), rejection(block=True), mars()], ids=lambda v: v.name)
def test_a_tree_of_one_node_is_plain_decoding(rule):
    logits = jax.random.normal(jax.random.key(0), (3, 1, 5))
    controls = rule_oracles.controls_of([(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0)])
    tree = trees.chain(jnp.zeros((3, 1), jnp.int32))
    verdict = jax.jit(judge(rule))(rule_oracles.keys_of(0, 3), tree, logits, controls)
    assert verdict.path.tolist() == [[0]] * 3 and verdict.relaxed.shape == (3, 0)
    assert verdict.next_token[::2].tolist() == jnp.argmax(logits[::2, 0], axis=-1).tolist()
