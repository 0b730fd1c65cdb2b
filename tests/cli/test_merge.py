"""Rows that several processes decode are those of one: `generate --part` and `mars-jax merge`."""

from __future__ import annotations

import json

import pytest

from mars_jax.cli import merge
from mars_jax.cli.generate import command
from mars_jax.cli.part import Part, parse_part
from mars_jax.core.errors import MarsError

TIMES = ("seconds", "tokens_per_second")
PROMPTS = [
    {"prompt": "Once upon a time"},
    {"prompt": "Tom had", "id": "tom", "temperature": 0.5},
    {"prompt": "The cat", "seed": 9},
    {"prompt": "A\u2028line"},
    {"prompt": "Lily"},
]


def array(number, of, **others):
    """What Slurm tells a task of an array."""
    told = {"ID": number, "COUNT": of, "MIN": 0, "MAX": of - 1} | others
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in told.items()}


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
        with pytest.MonkeyPatch.context() as patched:
            for name, value in array(number, 3).items():
                patched.setenv(name, value)
            assert decode("out.jsonl", "--part", "auto") == 0
    cut = folder / "out-00001-of-00003.jsonl"
    cut.write_text(cut.read_text()[:-20])  # its writer was killed
    return folder, decode


def message(capsys, *argv):
    assert merge.main(list(map(str, argv))) == 2
    return capsys.readouterr().err


def rows_of(path):
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
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
    # As many other prompts.
    beside = folder / "out-00002-of-00003.jsonl.settings.json"
    kept = beside.read_text()
    digest = json.loads(kept)["settings"]["part"]["prompts"]
    beside.write_text(kept.replace(digest, "0" * len(digest)))
    assert "was decoded with other prompts" in message(capsys, out)
    beside.write_text(kept)

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
    first = folder / "out-00000-of-00003.jsonl"
    for name in (first, folder / f"{first.name}.settings.json"):
        (folder / name.name.replace("00000-of", "00002-of")).write_bytes(name.read_bytes())
    assert "out-00002-of-00003.jsonl' holds part 0/3: decode it again with --part 2/3." in message(
        capsys, out
    )
    third.write_bytes(kept[0])
    (folder / f"{third.name}.settings.json").write_bytes(kept[1][:-9])
    assert "is damaged: decode that part again" in message(capsys, out)
    (folder / "out-00000-of-00002.jsonl").touch()
    assert "there are parts of 2 and of 3 runs" in message(capsys, out)
    assert "there are no parts of" in message(capsys, folder / "other.jsonl")


@pytest.mark.parametrize("text", ["3/3", "1", "1/0", "a/b"])
def test_a_part_that_cannot_be_is_named(text, capsys):
    assert command.main(["--part", text, "--output", "x", "hello"]) == 2
    assert f"--part is {text!r}: expected auto, or I/N, such as 0/4" in capsys.readouterr().err


def test_more_parts_than_rows_and_no_file_are_refused(tmp_path, capsys):
    assert command.main(["--part", "2/3", "--output", str(tmp_path / "x.jsonl"), "hello"]) == 2
    assert "--part 2/3 has none of the 1 rows: take fewer parts." in capsys.readouterr().err
    assert command.main(["--part", "0/1", "hello"]) == 2
    assert "--part does not apply without --output, of which it writes a part" in capsys.readouterr().err


SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "node[1-4]"}
POD = {"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "16"}


@pytest.mark.parametrize(
    ("told", "part"),
    [
        (array(3, 16), Part(3, 16)),
        (array(3, 16) | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Part(3, 16)),
        (SRUN, Part(1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Part(0, 1)),
        (POD, Part(3, 16)),
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, Part(1, 2)),
        (
            POD | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
            Part(3, 16),
        ),  # slices of one host
    ],
)
def test_auto_is_the_number_that_a_scheduler_gives(told, part):
    assert parse_part("auto", {"HOME": "/", **told}) == part


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "none of SLURM_ARRAY_TASK_ID, SLURM_PROCID, JOB_COMPLETION_INDEX, TPU_WORKER_ID is set: start it by"),
        (SRUN | POD, "SLURM_PROCID says 1/4 and JOB_COMPLETION_INDEX says 3/16: give I/N."),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX is '3' with JOB_COMPLETIONS '': set both"),
        ({"TPU_WORKER_ID": "0"}, "TPU_WORKER_ID is '0' with TPU_WORKER_HOSTNAMES '': set both"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID is '4' with SLURM_NTASKS '4'"),
        (array(3, 16) | SRUN, "each task of the Slurm array has 4 processes: give them one, or give I/N."),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "Slurm has 4 tasks: start it by srun, or give I/N."),
        # Some tasks of an array, run again.
        (array(3, 1, MIN=3, MAX=3), "the Slurm array has 1 tasks from 3 to 3: begin it with one such as --array=0-15"),
        (array(3, 5, MIN=3, MAX=7), "the Slurm array has 5 tasks from 3 to 7"),
        (array(0, 1), "the Slurm array has 1 tasks from 0 to 0"),
        (array(1, 2, MAX=3), "the Slurm array has 2 tasks from 0 to 3"),
    ],
)  # fmt: skip
def test_auto_without_one_answer_is_refused(told, message):
    with pytest.raises(MarsError) as caught:
        parse_part("auto", told)
    assert message in str(caught.value) and str(caught.value).startswith("--part is auto, and ")
