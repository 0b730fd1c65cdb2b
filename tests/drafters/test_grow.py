"""Growing trees: the dynamic tree against a search in Python, and stopping by entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.errors import MarsError
from mars_jax.core.types import NO_TOKEN, Prompts, keys_from_seeds
from mars_jax.drafters.grow import Growth, grow
from mars_jax.drafters.tree_shapes import Dynamic
from tests.helpers import NO_WEIGHTS, draft_input, logits_after, ragged
from tests.helpers.fake_drafters import SMALL, VOCAB

LENGTHS = [1, 2, 9]


def propose(drafter, *, buffer=40, **chosen):
    """The first draft for three ragged prompts, and their tokens."""
    prompts, lengths = ragged(LENGTHS, buffer, VOCAB)
    controls = make_controls(len(LENGTHS), limit=buffer, **chosen)
    keys = keys_from_seeds(jnp.arange(len(LENGTHS), dtype=jnp.uint32))
    state = jax.jit(drafter.init)(NO_WEIGHTS, prompts, lengths)
    given = DraftInput(keys=keys, tokens=prompts, length=lengths, controls=controls)
    tree, _ = jax.jit(drafter.propose)(NO_WEIGHTS, state, given)
    return tree, [prompts[row, :n].tolist() for row, n in enumerate(LENGTHS)]


def log_probs(tokens):
    z = logits_after(SMALL, tokens, width=48).astype(np.float64)
    return z - np.log(np.sum(np.exp(z)))


def entropy_root(tokens):
    p = log_probs(tokens)
    return np.sqrt(-np.sum(np.exp(p) * p))


def branches(tree, row):
    """The tokens from the root to each drafted node, for every node that is not padding."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    depths, found = tree.depths[row].tolist(), []
    for node in range(1, len(tokens)):
        assert parents[node] < node
        if tokens[node] == NO_TOKEN:
            continue
        branch, at = [], node
        while at > 0:
            branch, at = [tokens[at], *branch], parents[at]
        assert len(branch) == depths[node]
        found.append(tuple(branch))
    return found


def search(past, shape, stop=np.inf):
    """EAGLE-2's tree in Python: every branch with its log-probability."""
    frontier, found = {(): 0.0}, {}
    for _ in range(shape.depth):
        level = {}
        for branch, score in frontier.items():
            if entropy_root(past + list(branch)) > stop:
                continue
            p = log_probs(past + list(branch))
            for token in np.argsort(-p, kind="stable")[: shape.top_k]:
                level[(*branch, int(token))] = score + p[token]
        found |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: shape.top_k])
    return sorted(found, key=lambda branch: -found[branch])[: shape.nodes - 1]


@pytest.mark.parametrize("shape", [Dynamic(3, 4, 12), Dynamic(2, 1, 9), Dynamic(4, 2, 60)], ids=str)
def test_a_dynamic_tree_is_the_one_that_a_search_finds(shape):
    tree, texts = propose(drafters.language_model(SMALL, tree=shape))
    assert tree.tokens.shape == (3, shape.num_nodes)
    for row, past in enumerate(texts):
        assert sorted(branches(tree, row)) == sorted(search(past, shape))


def test_a_drafter_that_is_certain_orphans_no_node():
    """Of a child whose probability is 1 rounding must not make more than its parent has."""
    batch, vocab, shape = 256, 7, Dynamic(2, 5, 6)
    rng = np.random.default_rng(0)

    def certain(width):
        """Logits of any size, of which one or two are far above the rest."""
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
        assert branches(tree, row)


@pytest.mark.slow
def test_accepted_branches_of_a_dynamic_tree_are_cached_in_place():
    """Ten rounds later the drafts still are those of a search that starts from nothing."""
    shape = Dynamic(3, 3, 10)
    drafter = drafters.language_model(SMALL, tree=shape)
    target = fake.hash_model(vocab_size=VOCAB, agree=0.8)
    decoder = decode.speculative_decoder(target, drafter, verify.exact(), prefill_chunk=16)
    prompts, lengths = ragged(LENGTHS, 40, VOCAB)
    keys = keys_from_seeds(jnp.arange(3, dtype=jnp.uint32))
    state = decode.start(
        decoder, NO_WEIGHTS, Prompts(prompts, lengths, make_controls(3, limit=40), verify.exact(), keys)
    )
    seen = set()
    for _ in range(10):
        state, info = decode.jitted_step(decoder, NO_WEIGHTS, state)
        seen |= set(info.num_emitted.tolist())
    assert {1, 2} <= seen
    tree, _ = drafter.propose(NO_WEIGHTS, state.draft, draft_input(state))
    for row in range(3):
        past = state.tokens[row, : state.length[row]].tolist()
        assert sorted(branches(tree, row)) == sorted(search(past, shape))


@pytest.mark.parametrize("tree", [(1, 1, 1, 1), (3, 2, 1), Dynamic(3, 3, 12)], ids=str)
def test_an_unsure_drafter_stops_in_the_rows_that_ask_for_it(tree):
    _, texts = propose(drafters.language_model(SMALL, 1))
    roots = [entropy_root(text) for text in texts]
    stop = float(np.median(roots))  # not in the least certain row, and in the middle one not before depth 2
    drafter = drafters.language_model(SMALL, tree=tree)
    full, _ = propose(drafter)
    cut, _ = propose(drafter, draft_stop=[stop * 1.0001, stop * 1.0001, np.inf])
    for row, text in enumerate(texts):
        asked = stop * 1.0001 if row < 2 else np.inf
        if isinstance(tree, Dynamic):
            want = search(text, tree, asked)
        else:
            want = []
            for branch in branches(full, row):
                befores = [text + list(branch[:i]) for i in range(len(branch))]
                if all(entropy_root(before) <= asked for before in befores):
                    want.append(branch)
        assert sorted(branches(cut, row)) == sorted(want)
    assert any(branches(cut, row) != branches(full, row) for row in range(2))
    assert branches(cut, 2) == branches(full, 2)


def test_a_dynamic_tree_of_nothing_is_refused():
    for sizes in [(0, 1, 9), (2, 0, 9), (2, 2, 1)]:
        with pytest.raises(MarsError, match="of a dynamic tree is"):
            Dynamic(*sizes)
    with pytest.raises(MarsError, match="20 children in a vocabulary of 13"):
        drafters.language_model(SMALL, tree=Dynamic(20, 2, 9))


@pytest.mark.parametrize("shape", [pytest.param((3, 2), marks=pytest.mark.slow), Dynamic(3, 3, 8)])
def test_a_sampled_tree_of_a_greedy_row_is_the_plain_one_and_others_carry_their_q(shape):
    """Each node's row of `draft_logits` is what the model says after its branch, processed."""
    plain, _ = propose(drafters.language_model(SMALL, tree=shape))
    drafter = drafters.language_model(SMALL, tree=shape, sample=True)
    mixed, texts = propose(drafter, temperature=[0.0, 1.5, 0.7], top_k=[0, 0, 2])
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(getattr(mixed, name)[0], getattr(plain, name)[0])
    for row, temperature, kept in ((1, 1.5, VOCAB), (2, 0.7, 2)):
        for branch in [(), *branches(mixed, row)]:
            children = [b[-1] for b in branches(mixed, row) if b[:-1] == branch]
            if not children:
                continue
            assert len(set(children)) == len(children) <= kept
            z = logits_after(SMALL, texts[row] + list(branch), width=48) / temperature
            z[np.argsort(-z)[kept:]] = -np.inf
            node = next(n for n in range(mixed.tokens.shape[1]) if path_to(mixed, row, n) == branch)
            got = jax.nn.softmax(mixed.draft_logits[row, node])
            np.testing.assert_allclose(got, np.exp(z - z.max()) / np.exp(z - z.max()).sum(), atol=1e-5)


def path_to(tree, row, node):
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    return () if node == 0 else (*path_to(tree, row, parents[node]), tokens[node])
