"""The embedded models: the default of a command that names no model."""

import pytest

from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.utils import assets
from tests.cli.conftest import timeless


@pytest.mark.parametrize(
    ("argv", "draft", "rule", "size"),
    [
        ([], f"model:{assets.DRAFT}", "mars", "fixed"),
        (["--target", assets.TARGET], f"model:{assets.DRAFT}", "exact", "usual"),
        (["--target", "somewhere"], "ngram", "exact", "usual"),
        (["--target", "somewhere", "--theta", "0.8"], "ngram", "mars", "fixed"),
        (["--target", "somewhere", "--verify", "rejection"], "ngram", "rejection", "fixed"),
        (["--target", "somewhere", "--compare"], "ngram", "mars", "fixed"),
        (["--target", "somewhere", "--draft", "ngram"], "ngram", "exact", "fixed"),
        (["--target", "somewhere", "--draft-size", "fixed"], "ngram", "exact", "fixed"),
        (["--draft", "none"], "none", "exact", "fixed"),
    ],
)
def test_what_is_left_open_follows_from_what_is_given(argv, draft, rule, size):
    args = parse([*argv, "hello"])
    choices = check_flags(args, [])
    assert args.target == ("somewhere" if "somewhere" in argv else assets.TARGET)
    assert (args.draft, args.rule.name, choices.draft_size) == (draft, rule, size)


@pytest.mark.slow
def test_the_rows_are_the_same_with_a_draft_device(run):
    argv = ["--json", "--batch-size", 2, "--num-draft-tokens", 3, "--max-new-tokens", 24]
    argv += ["Once upon a time", "The sea", "Tom had"]

    rows = timeless(run(*argv).out)
    assert timeless(run(*argv, "--draft-device", 1).out) == rows and len(rows) == 3
