"""The embedded models: the default of a command that names no model."""

import json

import pytest

from mars_jax import assets
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse


def plan(*argv):
    args = parse(argv)
    return args, check_flags(args, [])


def test_it_is_the_default():
    args, plan_ = plan("hello")
    assert args.target == assets.TARGET
    assert args.draft == f"model:{assets.DRAFT}"
    assert plan_.draft.kind == "model"
    assert (plan_.rule.name, plan_.draft_size) == ("mars", "fixed")


@pytest.mark.parametrize(
    ("argv", "draft", "rule", "size"),
    [
        (["--target", assets.TARGET], f"model:{assets.DRAFT}", "exact", "usual"),
        (["--target", "somewhere"], "ngram", "exact", "usual"),
        (["--target", "somewhere", "--num-draft-tokens", "4"], "ngram", "exact", "usual"),
        (["--target", "somewhere", "--theta", "0.8"], "ngram", "mars", "fixed"),
        (["--target", "somewhere", "--verify", "rejection"], "ngram", "rejection", "fixed"),
        (["--target", "somewhere", "--compare"], "ngram", "mars", "fixed"),
        (["--target", "somewhere", "--draft", "ngram"], "ngram", "exact", "fixed"),
        (["--target", "somewhere", "--draft-size", "fixed"], "ngram", "exact", "fixed"),
        (["--draft", "ngram"], "ngram", "exact", "fixed"),
        (["--draft", "none"], "none", "exact", "fixed"),
        (["--json"], f"model:{assets.DRAFT}", "mars", "fixed"),
    ],
)
def test_what_is_left_open_follows_from_what_is_given(argv, draft, rule, size):
    args, plan_ = plan(*argv, "hello")
    assert (args.draft, plan_.rule.name, plan_.draft_size) == (draft, rule, size)


@pytest.mark.slow
def test_the_embedded_pair_tells_a_story(run):
    outcome = run("--max-new-tokens", 40, "Once upon a time")
    assert outcome.code == 0
    assert outcome.out.startswith("Once upon a time")
    assert len(outcome.out.split()) > 20


@pytest.mark.slow
def test_the_rows_are_the_same_with_a_draft_device(run):
    flags = ["--json", "--batch-size", 2, "--num-draft-tokens", 3, "--max-new-tokens", 24]
    prompts = ["Once upon a time", "The sea", "Tom had"]
    found = []
    for extra in ([], ["--draft-device", 1]):
        outcome = run(*flags, *extra, *prompts)
        assert outcome.code == 0
        rows = [json.loads(line) for line in outcome.out.splitlines()]
        timed = ("seconds", "tokens_per_second")
        found.append([{key: value for key, value in row.items() if key not in timed} for row in rows])
    assert found[0] == found[1] and len(found[0]) == 3
