"""Rows on disk: one writer, complete lines, and rows of a single run."""

import json
import os
import subprocess
import sys

import pytest

from mars_jax.serve.rows import RowFile
from mars_jax.utils.errors import MarsError

WEIGHTS = {"target": "a", "draft": "b"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def open_file(path, settings=None, weights=WEIGHTS, **options):
    file = RowFile(path, {"seed": 0} if settings is None else settings, **options)
    file.start(weights)
    return file


def write(path, *numbers, **options):
    file = open_file(path, **options)
    for number in numbers:
        file.append({"id": number, "text": "é\n\u2028"})
    file.close()
    return path.read_bytes()


def refusal(path, **options):
    """Return the message of the error that rejects the file, and check that the file is unchanged."""
    content = path.read_bytes()
    with pytest.raises(MarsError) as caught:
        open_file(path, **options)
    assert path.read_bytes() == content
    return str(caught.value)


def test_each_row_is_synced_before_the_next(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes().count(b"\n")))
    write(path, 0, 1, 2)
    # The settings and their file's name are synced before any row.
    assert synced == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("cut", [1, 9, -1])
def test_the_next_row_cuts_off_a_torn_line(path, cut):
    intact = write(path, 0, 1)
    first = intact[: intact.index(b"\n") + 1]
    torn = first + intact[len(first) :][:cut]
    path.write_bytes(torn)
    file = open_file(path)
    assert [row["id"] for row in file.rows] == [0] and path.read_bytes() == torn
    file.append({"id": 1, "text": "é\n\u2028"})
    file.close()
    assert path.read_bytes() == intact


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\0" * 20 + b'"}\n'])
def test_nul_bytes_of_a_power_cut_are_a_torn_line(path, tail):
    intact = write(path, 0)
    path.write_bytes(intact + tail)
    assert write(path) == intact + tail
    assert write(path, 1).startswith(intact + b'{"id": 1')


def test_damage_further_up_is_refused(path):
    path.write_bytes(write(path, 0, 1).replace(b"id", b"\0\0", 1))
    assert refusal(path).startswith(f"line 1 of '{path}' is not a row of this run: choose another --output")


def test_a_batch_makes_only_rows_that_are_missing(path):
    def make():
        return [{"id": number, "value": number} for number in (1, 2)]

    write(path, 1)
    file = open_file(path)
    rows = file.batch([{"id": 1}, {"id": 2}], make)
    assert "value" not in rows[0] and rows[1]["value"] == 2
    assert file.batch([{"id": 2}, {"id": 1}], pytest.fail) == rows[::-1]
    file.close()
    assert path.read_bytes().count(b"\n") == 2


def test_rows_of_several_files_can_be_joined(path, tmp_path):
    parts = [write(tmp_path / f"part-{number}.jsonl", number) for number in (1, 0)]
    path.write_bytes(b"".join(parts))
    file = open_file(path)
    assert [row["id"] for row in file.batch([{"id": 0}, {"id": 1}], pytest.fail)] == [0, 1]
    file.close()
    foreign_part = write(tmp_path / "part-2.jsonl", 2, weights=WEIGHTS | {"draft": "c"})
    path.write_bytes(b"".join([*parts, foreign_part]))
    assert refusal(path).startswith(f"line 3 of '{path}' is not a row of this run")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"settings": {"seed": 1}}, "was begun with seed 0, not 1: choose another --output, or the settings"),
        ({"settings": {}}, "was begun with seed 0, not at its default"),
        ({"settings": {"seed": 0, "theta": 0.5}}, "was begun with theta at its default, not 0.5"),
        ({"weights": {"target": "a"}}, "was begun with other weights of the draft"),
        ({"resume": False}, "exists: add --resume to continue it"),
    ],
)
def test_a_file_of_another_run_is_refused_by_what_differs(path, options, text):
    write(path, 0)
    assert text in refusal(path, **options)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ('{"settings": {"seed": 0}, "own": {}, "weights": {}}', "was begun by mars-jax 0.1, and this is"),
        ("[]", "rows.jsonl.settings.json' is damaged: choose another --output"),
        ('{"ver', "rows.jsonl.settings.json' is damaged: choose another --output"),
    ],
)
def test_old_and_damaged_settings_are_refused(path, settings, text):
    write(path, 0)
    path.with_name("rows.jsonl.settings.json").write_text(settings)
    assert text in refusal(path)


@pytest.mark.parametrize("content", ["notes", "{}\n"])
def test_a_file_of_something_else_is_refused(path, content):
    path.write_text(content)
    assert "is not a" in refusal(path)


@pytest.mark.parametrize(("name", "reason"), [(".", "is not a regular file"), ("none/x", "cannot be opened")])
def test_a_path_that_takes_no_file_is_refused(tmp_path, name, reason):
    with pytest.raises(MarsError, match=reason):
        RowFile(tmp_path / name, {})


def test_a_run_without_rows_leaves_no_file(path):
    open_file(path).close()
    assert not path.exists()
    path.touch()
    open_file(path).close()
    assert path.exists()


def test_one_process_writes_at_a_time(path):
    code = "import sys, time; from mars_jax.serve.rows import RowFile; file = RowFile(sys.argv[1], {'seed': 0}); "
    code += "print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        with pytest.raises(MarsError, match=r"another process is writing to '.*rows\.jsonl'"):
            open_file(path)
        process.kill()
        process.wait()
    open_file(path).close()


def test_settings_are_readable_json(path):
    write(path, 0, settings={"seed": 0, "tree": (4, 2), "theta": float("inf")})
    recorded = json.loads(path.with_name("rows.jsonl.settings.json").read_text())
    assert recorded["tree"] == [4, 2] and recorded["theta"] == "inf" and recorded["fingerprints"] == WEIGHTS
