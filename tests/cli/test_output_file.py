"""The output file: whole rows in order, and a resume that trusts nothing."""

from __future__ import annotations

import json
import os

import pytest

from mars_jax.cli.generate.output_file import OutputFile, check_output
from mars_jax.cli.generate.rows import to_line, to_row
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import Metrics
from mars_jax.serve.requests import Completion, Request

METRICS = Metrics(
    steps=2, emitted=3, proposed=4, accepted_exact=1, accepted_relaxed=0, depth_histogram=(1, 1), regret=0.0
)
REQUESTS = [Request(prompt=f"prompt é {i}", prompt_tokens=(i, 7), id=i or None) for i in range(3)]


def completion(index, tokens=(1, 2, 3)):
    return Completion(
        request=REQUESTS[index], text="x\n", tokens=list(tokens), finish_reason="length", metrics=METRICS, seconds=0.5
    )  # fmt: skip


def open_file(path, requests=REQUESTS, rule="exact"):
    return OutputFile(str(path), requests, rule)


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
    file = open_file(path)
    assert not path.exists()
    for index in range(3):
        file.append(completion(index))
        assert path.read_text() == "".join(line(i) for i in range(index + 1))
    file.close()
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert "id" not in rows[0] and [row["id"] for row in rows[1:]] == [1, 2]


def test_every_row_is_on_disk_before_the_next(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes().count(b"\n")))
    file = open_file(path)
    for index in range(3):
        file.append(completion(index))
    file.close()
    assert synced == [1, 2, 3]


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


def test_numbers_that_json_lacks_become_null():
    assert json.loads(to_line({"a": float("inf"), "b": float("nan"), "c": 1.5})) == {
        "a": None,
        "b": None,
        "c": 1.5,
    }


def test_a_path_that_cannot_be_written_is_refused_early(tmp_path, path):
    def message(place, *, resume=False):
        with pytest.raises(MarsError) as caught:
            check_output(str(place), resume=resume)
        return str(caught.value)

    check_output(str(path), resume=False)
    check_output(str(path), resume=True)
    path.touch()
    check_output(str(path), resume=True)
    assert "exists: add --resume" in message(path)
    assert "is not a regular file" in message(tmp_path)
    assert "there is no directory" in message(tmp_path / "none" / "rows.jsonl", resume=True)
