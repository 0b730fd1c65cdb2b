"""Draft shapes that `load` accepts: numbers, trees, and trees in the notation of the command line."""

import pytest

import mars_jax as mj
from mars_jax.core.errors import MarsError
from mars_jax.specs import parse_tree


@pytest.fixture(scope="module")
def target():
    return mj.load("tiny/target")


@pytest.mark.parametrize("tree", ["dynamic", "dynamic:4-3-12", "3-2"])
def test_a_tree_may_be_given_as_text(target, tree):
    made, meant = (
        mj.drafters.load("eagle:tiny/eagle3", target, tree=shape).drafter
        for shape in (tree, parse_tree(tree))
    )
    assert (made.num_nodes, made.max_depth) == (meant.num_nodes, meant.max_depth)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "dynamc"}, "tree is dynamc .did you mean dynamic"),
        ({"tree": 5}, "tree is 5: expected the children per node at each depth"),
        ({"tree": (2, 0)}, r"tree is \(2, 0\): expected the children per node"),
        ({"tree": [2.0]}, r"tree is \[2.0\]: expected the children per node"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens is 2.5: expected a whole number"),
        ({"head_embed": "mine"}, "head_embed is 'mine': expected one of own, target"),
        (
            {"head_embed": "target"},
            "head_embed does not apply to the drafter 'ngram'.*eagle:PATH or dflash:PATH",
        ),
        ({"num_draft_tokens": "3"}, "num_draft_tokens is '3': expected a whole number"),
    ],
)
def test_a_bad_shape_gets_one_sentence(options, sentence):
    with pytest.raises(MarsError, match=sentence):
        mj.drafters.load("ngram", None, **options)
