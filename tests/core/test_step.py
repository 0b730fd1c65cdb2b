"""The five parts of a step, each alone, on a model that is a hash of its text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, fake, step
from mars_jax.core.conditions import Conditions
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import make_edits
from mars_jax.core.emit import emit
from mars_jax.core.step import commit, score, step_keys
from mars_jax.core.types import CORRECTED, EXACT, NO_KIND, NO_TOKEN, Params, Prompts, keys_from_seeds
from tests.helpers import committed, logits_after, ragged

VOCAB, BUFFER, ROWS = 13, 32, 3
TARGET = fake.hash_model(vocab_size=VOCAB, agree=0.8)
SMALL = fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.8)
CHAIN = drafters.language_model(SMALL, 3)
TREE = drafters.language_model(SMALL, tree=(2, 2))
NOTHING = Params(target=())

# One program for each of two parts, whose every operation would be one.
propose = jax.jit(step.propose, static_argnums=0)
judge = jax.jit(step.judge)


def begun(drafter, rule=None, **settings):
    """A decoder and its state, of ragged prompts."""
    rule = verify.exact() if rule is None else rule
    tokens, length = ragged([2, 5, 9], BUFFER, VOCAB)
    edits = settings.pop("edits", None)
    controls = dataclasses.replace(make_controls(ROWS, limit=BUFFER, **settings), edits=edits)
    decoder = decode.speculative_decoder(TARGET, drafter, rule)
    keys = keys_from_seeds(np.arange(ROWS, dtype=np.uint32))
    return decoder, decode.start(decoder, NOTHING, Prompts(tokens, length, controls, rule, keys))


def scored(drafter, **settings):
    """A state, its draft, the conditions there, and what the target says of it."""
    decoder, state = begun(drafter, **settings)
    conditions = Conditions.of(NOTHING, state)
    tree, draft = propose(drafter, NOTHING, state, conditions, step_keys(state)[0])
    nodes = conditions.at(tree)
    return decoder, state, tree, draft, nodes, score(drafter, decoder.target, NOTHING, state, tree, nodes)


def text(state, row):
    return committed(state)[row]


def test_keys_of_the_target_are_constant_and_those_of_a_draft_fresh():
    _, state = begun(CHAIN)
    later = dataclasses.replace(state, length=state.length + 1)
    (draft, own), (again, same) = ([jax.random.key_data(k) for k in step_keys(s)] for s in (state, later))
    np.testing.assert_array_equal(own, same)
    assert (draft != again).any(axis=1).all()


def test_propose_drafts_under_the_last_token():
    _, state, tree, *_ = scored(CHAIN)
    for row in range(ROWS):
        past = text(state, row)
        assert tree.tokens[row, 0] == past[-1]
        for token in tree.tokens[row, 1:].tolist():
            assert token == int(np.argmax(logits_after(SMALL, past, width=BUFFER + 8)))
            past.append(token)


@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_score_gives_at_every_node_what_the_target_says_of_the_text_up_to_it(drafter):
    _, state, tree, _, _, scores = scored(drafter)
    assert scores.logits is scores.raw, "nobody asked for anything else"
    for row in range(ROWS):
        for node in range(tree.tokens.shape[1]):
            branch, at = [], node
            while at > 0:
                branch.insert(0, int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            wanted = logits_after(TARGET, text(state, row) + branch, width=BUFFER + 8)
            np.testing.assert_allclose(scores.raw[row, node], wanted, atol=1e-5)


def test_score_of_a_sparse_draft_of_nothing_is_that_of_its_root():
    drafter = drafters.ngram(4)
    plain = drafter._replace(traits=())
    found = []
    for one in (drafter, plain):
        decoder, state = begun(one)
        tree, _ = propose(one, NOTHING, state, Conditions.of(NOTHING, state), step_keys(state)[0])
        tree = dataclasses.replace(tree, tokens=tree.tokens.at[:, 1:].set(NO_TOKEN))
        nodes = Conditions.of(NOTHING, state).at(tree)
        found.append(
            jax.jit(
                lambda s, one=one, d=decoder, t=tree, n=nodes: score(one, d.target, NOTHING, s, t, n).raw
            )(state)
        )
    assert found[0].shape == found[1].shape
    np.testing.assert_array_equal(found[0][:, 0], found[1][:, 0])


def test_judge_is_the_rule_and_never_takes_what_is_forbidden():
    """A simulated rule takes whatever is drafted, but for a token that is banned."""
    rule = contrib.simulated(4)
    _, state, tree, _, nodes, scores = scored(CHAIN, rule=rule)
    _, verify_keys = step_keys(state)
    verdict, _, trusted = judge(NOTHING, state, tree, scores, nodes, verify_keys)
    assert verdict.num_accepted.tolist() == [3] * ROWS and trusted is None
    banned = int(tree.tokens[0, 2])
    edits = make_edits(ROWS, logit_bias={banned: -jnp.inf})
    state = dataclasses.replace(state, controls=dataclasses.replace(state.controls, edits=edits))
    nodes = Conditions.of(NOTHING, state).at(tree)
    scores = scores._replace(logits=nodes.on(scores.raw, tree, state))
    cut, _, _ = judge(NOTHING, state, tree, scores, nodes, verify_keys)
    assert int(cut.num_accepted[0]) <= 1 and banned not in cut.next_token.tolist()
    strict = dataclasses.replace(
        state, controls=dataclasses.replace(state.controls, strict=jnp.ones(ROWS, bool))
    )
    told, _, _ = judge(NOTHING, strict, tree, scores, nodes, verify_keys)
    wanted, _, _ = judge(
        NOTHING, dataclasses.replace(state, rule=verify.exact()), tree, scores, nodes, verify_keys
    )
    np.testing.assert_array_equal(told.path, wanted.path)


def test_emit_appends_what_was_accepted_and_says_what_it_is():
    _, state, tree, _, nodes, scores = scored(CHAIN)
    verdict, _, _ = judge(NOTHING, state, tree, scores, nodes, step_keys(state)[1])
    after, info = emit(state, tree, verdict, scores.raw, scores.logits)
    for row in range(ROWS):
        count = int(verdict.num_accepted[row])
        wanted = [*tree.tokens[row, 1 : count + 1].tolist(), int(verdict.next_token[row])]
        assert text(after, row) == text(state, row) + wanted
        kinds = [EXACT] * count + [CORRECTED] + [NO_KIND] * (CHAIN.max_depth - count)
        assert info.kind[row].tolist() == kinds
    assert after.cache is state.cache and after.rule is state.rule


def test_commit_moves_the_rows_of_a_path_and_leaves_rows_that_are_done():
    decoder, state, tree, draft, nodes, scores = scored(TREE, rule=verify.mars(theta=0.5))
    state = dataclasses.replace(state, done=jnp.asarray([False, True, False]))
    verdict, rule, _ = judge(NOTHING, state, tree, scores, nodes, step_keys(state)[1])
    emitted, _ = emit(state, tree, verdict, scores.raw, scores.logits)
    moved = dataclasses.replace(rule, theta=rule.theta + 1)
    parts = {"cache": scores.output.cache, "draft": draft, "rule": moved, "guides": None}
    after = commit(decoder.target, state, emitted, tree, verdict, **parts)
    np.testing.assert_allclose(after.rule.theta, [1.5, 0.5, 1.5])
    wanted = decoder.target.commit(scores.output.cache, state.length - 1, verdict.path)
    jax.tree.map(np.testing.assert_array_equal, after.cache, wanted)
    assert after.draft is draft and text(after, 1) == text(state, 1)
