"""`benchmark --part` and `mars-jax merge`: the folder of one process, whoever decoded which problems."""

from __future__ import annotations

import json
import shutil

import pytest

from mars_jax.cli import merge
from mars_jax.lab.commands.benchmark import main
from mars_jax.lab.evaluate import answers
from mars_jax.lab.evaluate.benchmark import plots
from tests.lab.evaluate.conftest import dying_after, read_folder

TIMES = {"date", "seconds", "tokens_per_second", "speedup", "seconds_per_task", "task_speedup"}


def timeless(value):
    """A JSON value without the times in it."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


PARTS = 4
CHAIN = ("--num-draft-tokens", 2)
PROMPTS = ["the sea", "a story", "of the sun", "and the", "a sea"]


def call(*argv):
    return main([str(a) for a in argv])


def told(capsys, *argv, by=merge.main):
    """The sentence of a refusal."""
    capsys.readouterr()
    assert by([str(a) for a in argv]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def blank(summary, folder, caption):
    """Empty pictures."""
    for name in plots.PICTURES:
        (folder / f"{name}.png").write_bytes(b"")


@pytest.fixture(scope="module")
def flags(target, tmp_path_factory):
    """Two tasks, of which the second alone has problems for every part; the margins of both arms are counted."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("parts")
    (folder / "stories.txt").write_text("\n<|endoftext|>\n".join(["a b " * 30] * 2))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return [
        *("--target", target, "--draft", "ngram", "--max-new-tokens", 6),
        *("--task", f"stories={folder / 'stories.txt'}", "--task", f"jsonl={folder / 'prompts.jsonl'}"),
        *("--temperatures", 1),
    ]


@pytest.mark.parametrize("batch_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_four_parts_of_which_one_was_killed_are_one_process(flags, tmp_path, capsys, monkeypatch, batch_size):
    if batch_size == 1:  # pictures take longer than all else
        monkeypatch.setattr(plots, "draw", blank)
    flags = [*flags, *CHAIN, "--batch-size", batch_size]
    whole, out = tmp_path / "whole", tmp_path / "v1.5"
    assert call(*flags, "--output", whole) == 0
    for number in range(PARTS):
        with monkeypatch.context() as patched:
            if number == 1:
                patched.setattr(answers, "_decoded", dying_after(3))
            code = call(*flags, "--output", out, "--part", f"{number}/{PARTS}")
            assert code == (130 if number == 1 else 0)
    killed = tmp_path / "v1.5-00001-of-00004"
    assert f"'{killed}' is unfinished: run it again with --part 1/4, and it goes on." in told(capsys, out)
    before = (killed / "rows.jsonl").read_bytes()
    assert before and call(*flags, "--output", out, "--part", f"1/{PARTS}") == 0
    assert (killed / "rows.jsonl").read_bytes().startswith(before)
    capsys.readouterr()
    assert merge.main([str(out)]) == 0

    one, merged = read_folder(whole), read_folder(out)
    assert capsys.readouterr().out == f"{out}: {len(one.rows)} rows\n"
    assert timeless(merged.rows) == timeless(one.rows) and timeless(merged.summary) == timeless(one.summary)
    assert len(one.summary["tables"]) == 2
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    for name in ("settings.json", "texts.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert f"'{out}' exists: remove it" in told(capsys, out)

    # What one process makes of these rows, without a decode.
    again = shutil.copytree(out, tmp_path / "again")
    monkeypatch.setattr(answers, "_decoded", lambda *args, **options: pytest.fail("decoded"))
    assert call(*flags, "--output", again) == 0
    for name in ("rows.jsonl", "summary.json", "table.md", "report.html", "tau_theta.png"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


@pytest.fixture(scope="module")
def parts(flags, tmp_path_factory):
    """Two finished parts, without margins."""
    out = tmp_path_factory.mktemp("finished") / "out"
    for number in range(2):
        assert call(*flags, *CHAIN, "--controls", "none", "--output", out, "--part", f"{number}/2") == 0
    return out


def edit(folder, name, change):
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))


def test_what_is_no_part_of_the_run_is_refused(parts, tmp_path, capsys):
    out = tmp_path / "out"

    def message(change):
        for number in range(2):
            shutil.rmtree(tmp_path / f"out-0000{number}-of-00002", ignore_errors=True)
            shutil.copytree(f"{parts}-0000{number}-of-00002", tmp_path / f"out-0000{number}-of-00002")
        change(tmp_path / "out-00000-of-00002", tmp_path / "out-00001-of-00002")
        said = told(capsys, out)
        assert not [file for file in tmp_path.iterdir() if "-of-" not in file.name]  # nothing half-written
        return said

    def first_line(folder):
        rows = folder / "rows.jsonl"
        lines = rows.read_text().splitlines(keepends=True)
        return rows, lines[0], lines[1:]

    def lacks(_, second):
        rows, _, rest = first_line(second)
        rows.write_text("".join(rest))

    def twice(one, second):
        rows, _, rest = first_line(second)
        rows.write_text(first_line(one)[1] + "".join(rest))

    missing = "out-00001-of-00002' is missing: decode it with --part 1/2."
    assert missing in message(lambda one, second: shutil.rmtree(second))
    copied = "out-00001-of-00002' holds part 0/2: decode it again with --part 1/2."
    assert copied in message(lambda one, second: (shutil.rmtree(second), shutil.copytree(one, second)))
    seeded = message(lambda one, second: edit(second, "settings.json", lambda s: s.update(seed=7)))
    assert "out-00001-of-00002' was decoded with other seed (0 and not 7) than the parts before it" in seeded
    more = message(lambda one, second: edit(second, "settings.json", lambda s: s["part"].update(rows=9)))
    assert "was decoded with other rows (7 and not 9)" in more
    assert "out-00001-of-00002' is damaged: remove it, and run it again with --part 1/2." in message(lacks)
    assert "the parts of" in (said := message(twice)) and "have other rows than one run" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--refine", "x"], "--refine does not apply with --part, as every part would learn for itself"),
        (["--tune"], "--part does not apply with --tune"),
        (["--recipe", "embedded"], "--part does not apply with --recipe"),
        (["--part", "8/9"], "--part 8/9 has none of the 7 rows: take fewer parts."),
        (["--part", "2"], "--part is '2': expected auto, or I/N"),
    ],
)  # fmt: skip
def test_what_needs_all_problems_is_refused(flags, tmp_path, capsys, argv, message):
    assert message in told(capsys, *flags, "--output", tmp_path / "o", "--part", "0/2", *argv, by=main)
    assert not list(tmp_path.iterdir())
