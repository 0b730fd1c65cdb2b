"""A command that names no model takes the family inside the package."""

import json
import re

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
    assert plan_.measures_speedup


@pytest.mark.parametrize(
    ("argv", "draft", "measures"),
    [
        (["--target", assets.TARGET], f"model:{assets.DRAFT}", True),
        (["--target", "somewhere"], "ngram", False),
        (["--target", "somewhere", "--speedup"], "ngram", True),
        (["--draft", "ngram"], "ngram", True),
        (["--draft", "none"], "none", False),
        (["--no-speedup"], f"model:{assets.DRAFT}", False),
        (["--json"], f"model:{assets.DRAFT}", False),
        (["--output", "rows.jsonl"], f"model:{assets.DRAFT}", False),
    ],
)
def test_draft_and_speedup_follow_the_target(argv, draft, measures):
    args, plan_ = plan(*argv, "hello")
    assert args.draft == draft
    assert plan_.measures_speedup is measures


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speedup", "--compare"], "--speedup does not apply with --compare"),
        (["--speedup", "--json"], "--speedup does not apply with --json, which prints no statistics"),
        (
            ["--speedup", "--output", "rows.jsonl"],
            "--speedup does not apply with --output, which prints no statistics",
        ),
        (["--speedup", "--draft", "none"], "--speedup does not apply to --draft none"),
    ],
)
def test_a_speedup_that_nothing_would_show_is_refused(refused, argv, message):
    assert refused(*argv, "hello").startswith(f"error: {message}")


@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
@pytest.mark.slow
def test_a_story_and_how_much_faster_it_came(run, flags):
    outcome = run("--max-new-tokens", 40, *flags, "Once upon a time")
    assert outcome.code == 0
    assert outcome.out.startswith("Once upon a time")
    assert len(outcome.out.split()) > 20
    assert re.search(
        r"\n\d+\.\d\dx the speed of plain autoregression, which made \d+\.\d tokens/s here\n", outcome.err
    )


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
