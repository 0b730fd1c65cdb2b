"""The small-model drafter, compared with the same model run from an empty cache each round."""

import shutil
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.types import keys_from_seeds
from mars_jax.drafters import Dynamic
from mars_jax.drafters.tree_shapes import parse_tree
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError, MarsWarning
from tests.helpers import NO_WEIGHTS, begin, draft_input, logits_after, ragged
from tests.helpers.drafted import check_best_children
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB


def scores(tokens):
    return logits_after(SMALL, tokens, width=48)


@pytest.mark.parametrize(
    "tree", [pytest.param((3, 2, 1), marks=pytest.mark.slow), Dynamic(3, 3, 10)], ids=str
)
def test_drafts_are_those_of_a_fresh_model_after_rounds_of_mixed_acceptance(tree):
    drafter = drafters.language_model(SMALL, tree=tree)
    decoder, state = begin(TARGET, drafter, verify.exact(), *ragged([1, 2, 9], 40, VOCAB))
    counts, propose = set(), jax.jit(drafter.propose)
    for _ in range(8):
        draft, _ = propose(NO_WEIGHTS, state.draft, draft_input(state))
        check_best_children(draft, state, scores)
        state, info = decode.jitted_step(decoder, NO_WEIGHTS, state)
        counts |= set(info.num_emitted.tolist())
    assert {1, 2} <= counts, "a draft was rejected and one was accepted"


def test_sampled_drafts_follow_the_processed_distribution_they_report():
    drafter = drafters.language_model(SMALL, 2, sample=True)
    rows = 4000
    prompts, lengths = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in ragged([4], 12, VOCAB))
    controls = make_controls(rows, limit=12, temperature=0.7, top_k=4)
    keys = keys_from_seeds(jnp.arange(rows, dtype=jnp.uint32))
    state = jax.jit(drafter.init)(NO_WEIGHTS, prompts, lengths)
    inputs = DraftInput(keys=keys, tokens=prompts, length=lengths, controls=controls)
    tree, _ = jax.jit(drafter.propose)(NO_WEIGHTS, state, inputs)
    z = scores(prompts[0, :4].tolist()) / 0.7
    z[np.argsort(-z)[4:]] = -np.inf
    expected = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    np.testing.assert_allclose(jax.nn.softmax(tree.draft_logits[0, 0]), expected, atol=1e-6)
    shares = np.bincount(tree.tokens[:, 1], minlength=VOCAB) / rows
    # Five standard deviations of a share estimated from 4000 draws.
    np.testing.assert_allclose(shares, expected, atol=5 * 0.5 / rows**0.5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: drafters.language_model(SMALL, 0), "num_draft_tokens is 0: expected a whole number from 1 to 128"),
        (lambda: drafters.language_model(SMALL, tree=(2, 0)), "expected the children per node"),
        (lambda: drafters.language_model(SMALL, tree=(20,)), "20 children in a vocabulary of 13"),
        (lambda: drafters.language_model(SMALL, tree=Dynamic(20, 2, 9)), "20 children in a vocabulary of 13"),
        (lambda: Dynamic(0, 1, 9), "of a dynamic tree is"),
        (lambda: Dynamic(2, 0, 9), "of a dynamic tree is"),
        (lambda: Dynamic(2, 2, 1), "of a dynamic tree is"),
        (lambda: drafters.ngram(0), "num_draft_tokens is 0: expected a whole number from 1 to 128"),
        (lambda: drafters.ngram(4, max_ngram=2, min_ngram=3), "1 <= min_ngram <= max_ngram"),
        (lambda: loaded(tree="dynamc"), "tree is dynamc .did you mean dynamic"),
        (lambda: loaded(tree=5), "tree is 5: expected the children per node at each depth"),
        (lambda: loaded(tree=(2, 0)), r"tree is \(2, 0\): expected the children per node"),
        (lambda: loaded(tree=[2.0]), r"tree is \[2.0\]: expected the children per node"),
        (lambda: loaded(num_draft_tokens=2.5), "num_draft_tokens is 2.5: expected a whole number"),
        (lambda: loaded(num_draft_tokens="3"), "num_draft_tokens is '3': expected a whole number"),
        (lambda: loaded(head_embed="mine"), "head_embed is 'mine': expected one of own, target"),
        (lambda: loaded(head_embed="target"), "head_embed does not apply to the drafter 'ngram'.*eagle:PATH or dflash"),
        (lambda: loaded(draft_size="auto", spec="none"), "draft a chain with"),
        (lambda: loaded(draft_size="big"), "expected 'fixed' or 'auto'"),
        (lambda: loaded(any_rule=True), "does not apply to drafts of a fixed size"),
    ],
)  # fmt: skip
def test_a_bad_size_or_shape_gets_one_sentence(make, sentence):
    with pytest.raises(MarsError, match=sentence):
        make()


def loaded(*, spec="ngram", **options):
    return drafters.load(spec, cast(Any, None), **options)


@pytest.mark.parametrize("tree", ["dynamic", "dynamic:4-3-12", "3-2"])
def test_a_tree_may_be_given_as_text(tree):
    target, specs = mj.load("tiny/target"), (tree, parse_tree(tree))
    actual, expected = (drafters.load("eagle:tiny/eagle3", target, tree=spec).drafter for spec in specs)
    assert (actual.num_nodes, actual.max_depth) == (expected.num_nodes, expected.max_depth)


def test_head_embed_replaces_the_embedding_of_a_head_by_its_targets(tmp_path):
    """Give the head of the package an embedding that differs from its target's."""
    path = shutil.copytree(assets.path("tiny/eagle3"), tmp_path / "head")
    tensors, target = load_file(path / "model.safetensors"), mj.load("tiny/target")
    embedding = np.asarray(target.params["embed"])[::-1].copy()
    save_file(tensors | {"embed_tokens.weight": embedding}, path / "model.safetensors")
    with pytest.warns(MarsWarning, match="is not the target's"):
        assert "embed" in drafters.load(f"eagle:{path}", target).params
    replaced = drafters.load(f"eagle:{path}", target, head_embed="target").params
    intact = drafters.load("eagle:tiny/eagle3", target).params
    jax.tree.map(np.testing.assert_array_equal, replaced, intact)
