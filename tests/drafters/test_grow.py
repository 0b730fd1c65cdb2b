"""Growing trees: the dynamic tree compared with a search in Python, and stopping by entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.types import keys_from_seeds
from mars_jax.drafters.grow import Growth, grow
from mars_jax.drafters.tree_shapes import Dynamic
from tests.helpers import NO_WEIGHTS, logits_after, ragged
from tests.helpers.drafted import branches
from tests.helpers.fake_drafters import SMALL, VOCAB

LENGTHS = [1, 2, 9]


def propose(drafter, *, buffer=40, **settings):
    """Return the first draft for three ragged prompts, and their tokens."""
    prompts, lengths = ragged(LENGTHS, buffer, VOCAB)
    controls = make_controls(len(LENGTHS), limit=buffer, **settings)
    keys = keys_from_seeds(jnp.arange(len(LENGTHS), dtype=jnp.uint32))
    state = jax.jit(drafter.init)(NO_WEIGHTS, prompts, lengths)
    inputs = DraftInput(keys=keys, tokens=prompts, length=lengths, controls=controls)
    tree, _ = jax.jit(drafter.propose)(NO_WEIGHTS, state, inputs)
    return tree, [prompts[row, :n].tolist() for row, n in enumerate(LENGTHS)]


def log_probs(tokens):
    z = logits_after(SMALL, tokens, width=48).astype(np.float64)
    return z - np.log(np.sum(np.exp(z)))


def entropy_root(tokens):
    p = log_probs(tokens)
    return np.sqrt(-np.sum(np.exp(p) * p))


def drafted(tree, row):
    """Return every drafted branch, sorted."""
    return sorted(path for path in branches(tree, row).values() if path)


def search(past, shape, stop=np.inf):
    """Search for EAGLE-2's tree in Python and return its branches, the likeliest first."""
    frontier, scores = {(): 0.0}, {}
    for _ in range(shape.depth):
        level = {}
        for branch, score in frontier.items():
            if entropy_root(past + list(branch)) > stop:
                continue
            p = log_probs(past + list(branch))
            for token in np.argsort(-p, kind="stable")[: shape.top_k]:
                level[(*branch, int(token))] = score + p[token]
        scores |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: shape.top_k])
    return sorted(scores, key=lambda branch: -scores[branch])[: shape.nodes - 1]


@pytest.mark.parametrize("shape", [Dynamic(3, 4, 12), Dynamic(2, 1, 9), Dynamic(4, 2, 60)], ids=str)
def test_a_dynamic_tree_is_the_one_that_a_search_finds(shape):
    tree, texts = propose(drafters.language_model(SMALL, tree=shape))
    assert tree.tokens.shape == (3, shape.num_nodes)
    for row, past in enumerate(texts):
        assert drafted(tree, row) == sorted(search(past, shape))


def test_a_drafter_that_is_certain_orphans_no_node():
    """Rounding must not give a child of probability 1 a better score than its parent."""
    batch, vocab, shape = 256, 7, Dynamic(2, 5, 6)
    rng = np.random.default_rng(0)

    def certain(width):
        """Return logits with one or two values far above the others."""
        z = np.full((batch, width, vocab), -40.0) + rng.uniform(-3, 3, (batch, width, 1))
        for _ in range(2):
            places = rng.integers(vocab, size=(batch, width, 1))
            np.put_along_axis(z, places, rng.uniform(0, 20, (batch, width, 1)), axis=2)
        return jnp.asarray(z, jnp.float32)

    first, later = certain(1), certain(2)
    growth = Growth(
        logits=first,
        carry=jnp.zeros((batch,)),
        extend=lambda carry, level: (later + carry[:, None, None], carry + 0.7),
        first=jnp.zeros((batch,), jnp.int32),
    )
    root, controls = jnp.zeros((batch, 1), jnp.int32), make_controls(batch, limit=16)
    tree, *_ = jax.jit(lambda: grow(shape, False, growth, root, None, controls))()
    for row in range(batch):
        assert drafted(tree, row)


@pytest.mark.parametrize(
    "tree", [pytest.param((1, 1, 1, 1), marks=pytest.mark.slow), (3, 2, 1), Dynamic(3, 3, 12)], ids=str
)
def test_an_unsure_drafter_stops_in_the_rows_that_ask_for_it(tree):
    _, texts = propose(drafters.language_model(SMALL, 1))
    roots = [entropy_root(text) for text in texts]
    # The least certain row stops at its root, the middle row no earlier than depth 2.
    stop = float(np.median(roots)) * 1.0001
    drafter = drafters.language_model(SMALL, tree=tree)
    full, _ = propose(drafter)
    cut, _ = propose(drafter, draft_stop=[stop, stop, np.inf])
    for row, (text, limit) in enumerate(zip(texts, [stop, stop, np.inf], strict=True)):
        if isinstance(tree, Dynamic):
            expected = search(text, tree, limit)
        else:
            expected = [
                branch
                for branch in drafted(full, row)
                if all(entropy_root([*text, *branch[:i]]) <= limit for i in range(len(branch)))
            ]
        assert drafted(cut, row) == sorted(expected)
    assert any(drafted(cut, row) != drafted(full, row) for row in range(2))
    assert drafted(cut, 2) == drafted(full, 2)


@pytest.mark.parametrize("shape", [pytest.param((3, 2), marks=pytest.mark.slow), Dynamic(3, 3, 8)])
def test_a_sampled_tree_of_a_greedy_row_is_the_plain_one_and_others_carry_their_q(shape):
    """Each node's row of `draft_logits` holds the processed logits of the model after its branch."""
    greedy, _ = propose(drafters.language_model(SMALL, tree=shape))
    drafter = drafters.language_model(SMALL, tree=shape, sample=True)
    mixed, texts = propose(drafter, temperature=[0.0, 1.5, 0.7], top_k=[0, 0, 2])
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(getattr(mixed, name)[0], getattr(greedy, name)[0])
    for row, temperature, top_k in ((1, 1.5, VOCAB), (2, 0.7, 2)):
        paths = branches(mixed, row)
        for node, path in paths.items():
            children = [branch[-1] for branch in paths.values() if branch and branch[:-1] == path]
            if not children:
                continue
            assert len(set(children)) == len(children) <= top_k
            z = logits_after(SMALL, [*texts[row], *path], width=48) / temperature
            z[np.argsort(-z)[top_k:]] = -np.inf
            q = jax.nn.softmax(mixed.draft_logits[row, node])
            np.testing.assert_allclose(q, np.exp(z - z.max()) / np.exp(z - z.max()).sum(), atol=1e-5)
