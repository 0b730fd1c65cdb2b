"""The output file: whole rows in order, and a resume that trusts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.output_file import OutputFile, Recorded, recorded
from mars_jax.cli.generate.prompts import PromptRow, from_texts
from mars_jax.cli.generate.rows import to_row
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import Metrics
from mars_jax.serve.journal import to_line
from mars_jax.serve.requests import Completion, Request

METRICS = Metrics(
    steps=2, emitted=3, proposed=4, accepted_exact=1, accepted_relaxed=0, depth_histogram=(1, 1), regret=0.0
)
REQUESTS = [Request(prompt=f"prompt é {i}", prompt_tokens=(i, 7), id=i or None) for i in range(3)]


def completion(index, tokens=(1, 2, 3)):
    return Completion(
        request=REQUESTS[index], text="x\n", tokens=list(tokens), finish_reason="length", metrics=METRICS, seconds=0.5
    )  # fmt: skip


SETTINGS = Recorded({"seed": 1}, {"1": {"temperature": 0.5}})


def open_file(path, requests=REQUESTS, rule="exact", settings=SETTINGS, resume=True):
    file = OutputFile(str(path), settings, resume=resume)
    try:
        file.check(requests, rule)
    except MarsError:
        file.close()
        raise
    return file


def line(index, **changes):
    return to_line(to_row(completion(index), "exact") | changes) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def refusal(path, **options):
    """The sentence that refuses the file, which stays as it was."""
    before = path.read_bytes()
    with pytest.raises(MarsError) as caught:
        open_file(path, **options)
    assert path.read_bytes() == before
    return str(caught.value)


def test_rows_are_whole_lines_in_order(path):
    file = open_file(path, resume=False)
    for index in range(3):
        file.append(completion(index))
        assert path.read_text() == "".join(line(i) for i in range(index + 1))
    file.close()
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert "id" not in rows[0] and [row["id"] for row in rows[1:]] == [1, 2]


def test_a_process_that_is_terminated_says_what_is_left_to_do(path):
    file = open_file(path)
    for index in range(2):
        file.append(completion(index))
    assert file.end() == f" with 2 of 3 rows in '{path}': run it again with --resume to go on."
    file = open_file(path)
    file.append(completion(2))
    assert file.end() == f" with all 3 rows in '{path}': nothing is left to do."


def test_every_row_is_on_disk_before_the_next(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes().count(b"\n")))
    file = open_file(path)
    for index in range(3):
        file.append(completion(index))
    file.close()
    # The settings and the name of their file come first, before any row.
    assert synced == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("cut", [1, 9, 20, 60, len(line(1).encode()) - 1])
def test_a_torn_line_is_cut_off_by_the_next_row(path, cut):
    torn = (line(0).encode() + line(1).encode())[: len(line(0).encode()) + cut]
    path.write_bytes(torn)
    file = open_file(path)
    assert file.finished == 1
    assert path.read_bytes() == torn
    file.append(completion(1))
    file.close()
    assert path.read_text() == line(0) + line(1)


def test_an_empty_file_is_a_fresh_start(path):
    path.touch()
    assert open_file(path).finished == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (line(0) + line(2), "line 2 of '{}' is not about prompt 2"),
        (line(0, id=5), "line 1 of '{}' is not about prompt 1"),
        (line(0, prompt_tokens=[9]), "line 1 of '{}' is not about prompt 1"),
        (line(0, rule="mars"), "line 1 of '{}' has the rule 'mars' and this run 'exact'"),
        (line(0) + "{}\n", "line 2 of '{}' is not a row that this command wrote"),
        (line(0) + "notes\n", "line 2 of '{}' is not a row that this command wrote"),
        ("\n", "line 1 of '{}' is not a row that this command wrote"),
        ("3\n", "line 1 of '{}' is not a row that this command wrote"),
        ("notes without a newline", "the last line of '{}' is not the beginning of this run's next row"),
        (line(0) + line(0)[:30], "the last line of '{}' is not the beginning of this run's next row"),
        (line(0) + line(1) + line(2) + line(2), "'{}' has more rows than there are prompts"),
        (line(0) + line(1) + line(2) + "{", "the last line of '{}' is not the beginning"),
    ],
)
def test_a_file_of_another_run_is_refused_and_left_alone(path, content, expected):
    path.write_text(content)
    assert refusal(path).startswith(expected.format(path))


def test_a_row_that_decodes_otherwise_is_refused(path):
    path.write_text(line(0))
    file = open_file(path)
    file.check_same(0, completion(0))
    with pytest.raises(MarsError, match=r"line 1 of .* was decoded with other weights or settings"):
        file.check_same(0, completion(0, tokens=(1, 2, 4)))


def test_a_full_disk_is_one_sentence(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file = open_file(path)
    with pytest.raises(MarsError, match=r"cannot be written \(No space left on device\)"):
        file.append(completion(0))
    file.close()


def test_a_path_that_cannot_be_written_is_refused_early(tmp_path, path):
    def message(place, *, resume=False):
        with pytest.raises(MarsError) as caught:
            open_file(place, resume=resume)
        return str(caught.value)

    open_file(path, resume=False).close()
    assert not path.exists()  # nothing was written to it
    open_file(path, resume=True).close()
    path.touch()
    open_file(path, resume=True).close()
    assert path.exists()
    assert "exists: add --resume" in message(path)
    assert "is not a regular file" in message(tmp_path)
    assert "there is no directory" in message(tmp_path / "none" / "rows.jsonl", resume=True)
    path.write_text(line(0))
    assert "there is no directory" in message(path / "rows.jsonl")


# Locks.


def test_one_process_writes_at_a_time(path):
    """Two runs that both began with no file must not cut off each other's rows."""
    first = open_file(path, resume=False)
    for resume in (False, True):
        with pytest.raises(MarsError, match=r"another process is writing to '.*rows\.jsonl'"):
            open_file(path, resume=resume)
    first.append(completion(0))
    first.close()
    assert path.read_text() == line(0)
    second = open_file(path)
    assert second.finished == 1
    second.close()


def test_the_lock_dies_with_its_process(path):
    holds = "import sys, time; from mars_jax.serve.journal import Journal; "
    holds += "j = Journal(sys.argv[1]); print(1, flush=True)"
    command = [sys.executable, "-c", f"{holds}; time.sleep(60)", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        with pytest.raises(MarsError, match="another process"):
            open_file(path)
        process.kill()
        process.wait()
    open_file(path).close()


# What a power cut leaves.


@pytest.mark.parametrize(
    "tail", [b"\0", b"\0" * 5000, line(1).encode()[:30] + b"\0" * 9, b"\0" * 20 + b"x\n"]
)
def test_nul_bytes_at_the_end_are_a_torn_row(path, tail):
    """The length of the file was on disk, and not yet its bytes."""
    if tail.endswith(b"x\n"):  # its last page was
        tail = b"\0" * 20 + line(1).encode()[20:]
    path.write_bytes(line(0).encode() + tail)
    file = open_file(path)
    assert file.finished == 1
    file.append(completion(1))
    file.close()
    assert path.read_text() == line(0) + line(1)


def test_nul_bytes_further_up_are_damage_and_not_cut_off(path):
    path.write_bytes(line(0).encode().replace(b"p", b"\0") + line(1).encode())
    assert "line 1 of" in refusal(path)


# Settings.


def flags_of(*argv, rows=None):
    args = parse([*argv, "hello"])
    rows = rows or from_texts(["hello"])
    return recorded(args, check_flags(args, rows), rows)


def begun(path, settings):
    file = open_file(path, settings=settings, resume=False)
    file.append(completion(0))
    file.close()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-new-tokens", "9"], "other max new tokens (the default and not 9)"),
        (["--seed", "3"], "other seed (the default and not 3)"),
        (["--temperature", "1"], "other temperature (the default and not 1.0)"),
        (["--top-k", "5", "--temperature", "1"], "other temperature"),
        (["--theta", "0.5"], "other theta (the default and not 0.5)"),
        (["--max-relaxed-run", "0"], "other max relaxed run (the default and not 0)"),
        (["--dtype", "bfloat16"], 'other dtype (the default and not "bfloat16")'),
        (["--draft", "ngram"], 'other draft ("model:tiny/draft" and not "ngram")'),
        (["--tree", "8-6-4"], "other tree (the default and not [8, 6, 4])"),
        (["--tree", "dynamic"], "other tree (the default and not {"),
        (["--verify", "exact"], 'other verify ("mars" and not "exact")'),
        (["--ignore-eos"], "other ignore eos (the default and not true)"),
    ],
)
def test_other_settings_are_refused_by_the_one_that_differs(path, argv, expected):
    begun(path, flags_of())
    assert f"was begun with {expected}" in refusal(path, settings=flags_of(*argv))


@pytest.mark.parametrize("own", ['{"0": null}', '{"0": 3}', "[]", "null"])
def test_damaged_settings_are_refused_by_their_file(path, own):
    begun(path, flags_of())
    beside = path.with_name(f"{path.name}.settings.json")
    beside.write_text(f'{{"settings": {{}}, "own": {own}}}')
    assert f"'{beside}' is damaged: remove it" in refusal(path, settings=flags_of())


def test_what_decides_no_row_may_change(path):
    begun(path, flags_of())
    same = "--theta 0.9 --seed 0 --batch-size 3 --resume --output x --verify mars --no-check"
    open_file(path, settings=flags_of(*same.split())).close()


def test_a_row_that_chose_otherwise_is_named(path):
    rows = [PromptRow(where="p", prompt="a", settings={"temperature": 0.5}), PromptRow(where="p", prompt="b")]
    begun(path, flags_of(rows=rows))
    rows[0] = PromptRow(where="p", prompt="a", settings={"temperature": 0.7})
    message = refusal(path, settings=flags_of(rows=rows))
    assert "line 1 of" in message and "other temperature (0.5 and not 0.7), by its prompts file" in message
    # A row that is not on file yet may change.
    rows[0] = PromptRow(where="p", prompt="a", settings={"temperature": 0.5})
    rows[1] = PromptRow(where="p", prompt="b", settings={"temperature": 0.9})
    open_file(path, settings=flags_of(rows=rows)).close()


def test_weights_are_compared_before_rows(path):
    file = open_file(path, resume=False)
    file.check_weights({"target": "a", "draft": "b"})
    file.append(completion(0))
    file.close()
    file = OutputFile(str(path), SETTINGS, resume=True)
    file.check_weights({"target": "a", "draft": "b"})
    for other, name in (({"target": "a", "draft": "c"}, "draft"), ({"target": "c", "draft": "b"}, "target")):
        with pytest.raises(MarsError, match=f"was begun with other weights of the {name}: choose another"):
            file.check_weights(other)
    file.close()


def test_a_flag_that_does_not_exist_yet_is_recorded(path):
    args = parse(["hello"])
    begun(path, recorded(args, check_flags(args, []), []))
    args.fly_window = 4
    message = refusal(path, settings=recorded(args, check_flags(args, []), []))
    assert "other fly window (the default and not 4)" in message


def test_a_file_of_before_settings_were_recorded_resumes_with_a_warning(path, capsys):
    path.write_text(line(0))
    file = open_file(path)
    assert capsys.readouterr().err.startswith(f"note: '{path}' has no rows.jsonl.settings.json")
    file.append(completion(1))
    file.close()
    assert not path.with_name("rows.jsonl.settings.json").exists()
