"""Rows that several processes decode are those of one: `generate --part` and `mars-jax merge`."""

from __future__ import annotations

import json

import pytest

from mars_jax.cli import merge
from mars_jax.cli.generate import command

TIMES = ("seconds", "tokens_per_second")
PROMPTS = [
    {"prompt": "Once upon a time"},
    {"prompt": "Tom had", "id": "tom", "temperature": 0.5},
    {"prompt": "The cat", "seed": 9},
    {"prompt": "A"},
    {"prompt": "Lily"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One process's file, and those of three parts, of which one was interrupted and resumed."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))

    def decode(name, *flags, target="tiny/draft"):
        argv = ["--target", target, "--draft", "ngram", "--prompts-file", str(folder / "in.jsonl")]
        argv += ["--temperature", "1", "--max-new-tokens", "8", "--output", str(folder / name), *flags]
        return command.main(argv)

    assert decode("whole.jsonl") == 0
    for number in range(3):
        assert decode("out.jsonl", "--part", f"{number}/3") == 0
    cut = folder / "out-00001-of-00003.jsonl"
    cut.write_text(cut.read_text()[:-20])  # its writer was killed
    return folder, decode


def message(capsys, *argv):
    assert merge.main(list(map(str, argv))) == 2
    return capsys.readouterr().err


def rows_of(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def test_merged_they_are_what_one_process_writes(run, capsys):
    folder, decode = run
    out = folder / "out.jsonl"
    assert "out-00001-of-00003.jsonl' holds 1 of 2 rows: go on with it by --part 1/3 --resume" in message(
        capsys, out
    )
    assert not out.exists() and decode("out.jsonl", "--part", "1/3", "--resume") == 0
    assert merge.main([str(out)]) == 0 and capsys.readouterr().out == f"{out}: 5 rows\n"
    assert rows_of(out) == rows_of(folder / "whole.jsonl")
    beside = [folder / f"{name}.jsonl.settings.json" for name in ("out", "whole")]
    assert beside[0].read_bytes() == beside[1].read_bytes()
    assert "exists: remove it" in message(capsys, out)
    out.unlink()

    # A part of other settings, and one of other weights.
    third = folder / "out-00002-of-00003.jsonl"
    kept = [file.read_bytes() for file in (third, folder / f"{third.name}.settings.json")]
    for flags, target, told in (
        (("--seed", "1"), "tiny/draft", "other seed (the default and not 1)"),
        ((), "tiny/target", "other target"),
    ):
        third.unlink()
        assert decode("out.jsonl", "--part", "2/3", *flags, target=target) == 0
        assert f"was decoded with {told}" in message(capsys, out)
    third.unlink()
    assert "out-00002-of-00003.jsonl' is missing: decode it with --part 2/3." in message(capsys, out)
    third.write_bytes(kept[0])
    (folder / f"{third.name}.settings.json").write_bytes(kept[1][:-9])
    assert "is damaged: decode that part again" in message(capsys, out)
    (folder / "out-00000-of-00002.jsonl").touch()
    assert "there are parts of 2 and of 3 runs" in message(capsys, out)
    assert "there are no parts of" in message(capsys, folder / "other.jsonl")


@pytest.mark.parametrize("text", ["3/3", "1", "1/0", "a/b"])
def test_a_part_that_cannot_be_is_named(text, capsys):
    assert command.main(["--part", text, "--output", "x", "hello"]) == 2
    assert f"--part is {text!r}: expected I/N, such as 0/4" in capsys.readouterr().err


def test_more_parts_than_rows_and_no_file_are_refused(tmp_path, capsys):
    assert command.main(["--part", "2/3", "--output", str(tmp_path / "x.jsonl"), "hello"]) == 2
    assert "--part 2/3 has none of the 1 rows: take fewer parts." in capsys.readouterr().err
    assert command.main(["--part", "0/1", "hello"]) == 2
    assert "--part does not apply without --output, of which it writes a part" in capsys.readouterr().err
