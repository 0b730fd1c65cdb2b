"""Tests of `benchmark --part`: joined rows of all parts give the summary of a single process."""

import json

import pytest

from mars_jax.lab.evaluate import answers
from mars_jax.lab.evaluate.benchmark import plots
from tests.helpers import slow_but
from tests.lab.evaluate.conftest import call, dying_after, read_folder, timeless

PARTS = 4
PROMPTS = ["the sea", "a story", "of the sun", "and the", "a sea"]


def blank(summary, folder, caption):
    """Write empty pictures, because drawing would dominate the time of the test."""
    for name in plots.PICTURES:
        (folder / f"{name}.png").write_bytes(b"")


@pytest.fixture
def flags(target, tmp_path):
    """Return flags with two tasks. Only the second one has problems for every part."""
    pytest.importorskip("matplotlib")
    (tmp_path / "stories.txt").write_text("\n<|endoftext|>\n".join(["a b " * 30] * 2))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return [
        *("--target", target, "--draft", "ngram", "--num-draft-tokens", 2, "--max-new-tokens", 6),
        *("--task", f"stories={tmp_path / 'stories.txt'}", "--task", f"jsonl={tmp_path / 'prompts.jsonl'}"),
        *("--temperatures", 1, "--controls", "none"),
    ]


@pytest.mark.parametrize("batch_size", slow_but([1, 2], 1))
def test_joined_rows_of_parts_are_summarised_without_a_decode(flags, tmp_path, monkeypatch, batch_size):
    monkeypatch.setattr(plots, "draw", blank)
    flags = [*flags, "--batch-size", batch_size]
    single, out = tmp_path / "whole", tmp_path / "out"
    assert call(*flags, "--output", single) == 0
    parts = [tmp_path / f"part-{number}" for number in range(PARTS)]
    for number, part in enumerate(parts):
        with monkeypatch.context() as patched:
            if number == 1:
                patched.setattr(answers, "_decoded", dying_after(1))
            code = call(*flags, "--output", part, "--part", f"{number}/{PARTS}")
            assert code == (130 if number == 1 else 0)
    first_rows = (parts[1] / "rows.jsonl").read_bytes()
    assert call(*flags, "--output", parts[1], "--part", f"1/{PARTS}") == 0
    assert (parts[1] / "rows.jsonl").read_bytes().startswith(first_rows)

    out.mkdir()
    (out / "rows.jsonl").write_bytes(b"".join((part / "rows.jsonl").read_bytes() for part in parts))
    monkeypatch.setattr(answers, "_decoded", lambda *args, **options: pytest.fail("decoded"))
    assert call(*flags, "--output", out) == 0
    expected, joined = read_folder(single), read_folder(out)
    assert timeless(joined.summary) == timeless(expected.summary)
    assert sorted(map(str, timeless(joined.rows))) == sorted(map(str, timeless(expected.rows)))
    assert (out / "settings.json").read_bytes() == (single / "settings.json").read_bytes()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--refine", "x"], "--refine does not apply with --part, as every part would learn for itself"),
        (["--tune"], "--part does not apply with --tune"),
        (["--recipe", "embedded"], "--part does not apply with --recipe"),
        (["--part", "8/9"], "--part has none of the 7 problems: divide them into fewer parts."),
        (["--part", "2"], "--part is '2': expected I/N"),
    ],
)
def test_flags_that_need_all_problems_are_refused(flags, tmp_path, capsys, argv, message):
    output = tmp_path / "out"
    assert call(*flags, "--output", output, "--part", "0/2", *argv) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()
