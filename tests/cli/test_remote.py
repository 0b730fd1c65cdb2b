"""Prompts and rows where data lives: parquet, datasets, and objects of a store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mars_jax
from mars_jax.cli import commands, merge, remote
from mars_jax.cli.generate import uploaded_file
from mars_jax.cli.generate.prompts import read_prompts
from mars_jax.core.errors import MarsError
from mars_jax.specs import RuleChoice
from tests.helpers.shell import HEEDS

ROOT = Path(mars_jax.__file__).parents[1]
MARS = RuleChoice("mars", {})
FEW = ["--draft", "none", "--max-new-tokens", "8", "--temperature", "1"]
TIMES = ("seconds", "tokens_per_second")
PROMPTS = [
    {"prompt": "the sea"},
    {"messages": [{"role": "user", "content": "A\u2028line"}], "id": 7},
    {"prompt_tokens": [5, 6], "temperature": 0.5, "stop_strings": ["x"], "theta": 0.8},
]


@pytest.fixture
def store():
    """The URL of an empty folder."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield "memory://runs"
    memory.store.clear()


def objects():
    import fsspec

    return {
        name.rpartition("/")[2]: file.getvalue() for name, file in fsspec.filesystem("memory").store.items()
    }


def put(url, data):
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    system.pipe_file(path, data)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
    import io

    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def told(rows):
    return [(row.prompt, row.messages, row.tokens, row.id, row.settings, row.numbers) for row in rows]


def timeless(data):
    rows = [json.loads(line) for line in data.split(b"\n")[:-1]]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


# Prompts.


def test_prompts_are_the_same_from_jsonl_and_parquet_here_and_in_a_store(tmp_path, store, capsys):
    columns = {key: None for row in PROMPTS for key in row}
    table = parquet([columns | row for row in PROMPTS])
    (tmp_path / "in.jsonl").write_bytes(jsonl(PROMPTS))
    (tmp_path / "in.parquet").write_bytes(table)
    expected = told(read_prompts(str(tmp_path / "in.jsonl"), MARS))
    assert [row[3] for row in expected] == [None, 7, None]
    for name, data in (("in.jsonl", jsonl(PROMPTS)), ("in.parquet", table)):
        put(f"{store}/{name}", data)
        for path in (str(tmp_path / name), f"{store}/{name}", f"file://{tmp_path / name}"):
            assert told(read_prompts(path, MARS)) == expected, path
    put(f"{store}/in.txt", b"one\n\ntwo\n")
    assert [row.prompt for row in read_prompts(f"{store}/in.txt", MARS)] == ["one", "two"]
    assert capsys.readouterr().err == ""


def test_columns_of_a_dataset_that_are_no_keys_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "published"
    folder.mkdir()
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    more = {"category": "math", "choice": "A", "messages": turns}
    rows = [{"prompt": f"p{i}", "id": i, "seed": i, **more} for i in range(2)]
    (folder / "train.jsonl").write_bytes(jsonl(rows))
    found = read_prompts(str(folder), MARS)
    assert [(row.prompt, row.id, row.settings) for row in found] == [("p0", 0, {}), ("p1", 1, {})]
    assert (
        f"other columns of '{folder}' are left out: category, choice, messages, seed."
        in capsys.readouterr().err
    )
    (folder / "train.jsonl").write_bytes(jsonl([{"question": "Why?", "answer": "So."}]))
    with pytest.raises(MarsError, match="columns are question, answer, and none of prompt, messages"):
        read_prompts(str(folder), MARS)
    (folder / "train.jsonl").write_bytes(jsonl([{"prompt": "fine"}, {"prompt": ""}]))
    with pytest.raises(MarsError, match="row 1: the prompt is empty"):
        read_prompts(str(folder), MARS)


def test_what_cannot_be_read_is_one_sentence(tmp_path, store, refused, monkeypatch):
    import datetime

    def message(path):
        return refused("--prompts-file", path)

    (tmp_path / "torn.parquet").write_bytes(parquet([{"prompt": "a"}])[:-9])
    assert "torn.parquet' cannot be read (" in message(tmp_path / "torn.parquet")
    put(f"{store}/odd.parquet", parquet([{"prompt": "a", "temprature": 1.0}]))
    assert "odd.parquet, row 0: unknown key 'temprature' (did you mean" in message(f"{store}/odd.parquet")
    index = [{"prompt": "a", "max_new_tokens": x, "__index_level_0__": 5} for x in (8.0, None)]
    put(f"{store}/pandas.parquet", parquet(index))
    assert [row.settings for row in read_prompts(f"{store}/pandas.parquet", MARS)] == [
        {"max_new_tokens": 8},
        {},
    ]
    assert "there is no prompts file" in message(tmp_path / "in.JSONL")
    put(f"{store}/day.parquet", parquet([{"prompt": "a", "id": datetime.date(2026, 1, 1)}]))
    assert "day.parquet, row 0: id is of a type that JSON does not have" in message(f"{store}/day.parquet")
    assert f"there is no prompts file '{store}/none.jsonl'" in message(f"{store}/none.jsonl")
    assert "cannot be read (Protocol not known: nowhere): check the URL" in message("nowhere://b/in.jsonl")
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as where it is not installed
    assert "needs a package (Please install gcsfs" in message("gs://bucket/in.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs the package pyarrow: pip install pyarrow." in message(tmp_path / "torn.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "need the package datasets: pip install datasets." in message("owner/name")


# Rows.


@pytest.fixture
def decode(run, target, store):
    """Decode five prompts of the store into it."""
    put(f"{store}/in.jsonl", jsonl({"prompt": f"prompt {i}"} for i in range(5)))

    def call(name, *flags):
        argv = ["--target", target, *FEW, "--batch-size", 2, "--prompts-file", f"{store}/in.jsonl"]
        return run(*argv, "--output", f"{store}/{name}", *flags)

    return call


def test_rows_in_a_store_are_those_of_a_file_and_merge(decode, store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert decode("whole.jsonl").code == 0
    found = objects()
    assert found["whole.jsonl"].count(b"\n") == 5 and found["whole.jsonl.done"] == b"5\n"
    assert "exists: add --resume" in decode("whole.jsonl").err
    assert "holds all 5 rows already" in decode("whole.jsonl", "--resume").err

    for number in range(2):
        assert decode("out.jsonl", "--part", f"{number}/2").code == 0
    # The second part's machine was taken away, and its object has fewer rows and no mark.
    second, done = f"{store}/out-00001-of-00002.jsonl", objects()["out-00001-of-00002.jsonl.done"]
    rows = objects()["out-00001-of-00002.jsonl"]
    put(second, rows[: rows.index(b"\n") + 1])
    for mark in (b"", done):
        put(f"{second}.done", mark)
        assert merge.main([f"{store}/out.jsonl"]) == 2
        told = f"'{second}' has 1 rows and no '.done' of 1 beside it: wait for its run, or go on with it by --part 1/2"
        assert told in capsys.readouterr().err
    assert decode("out.jsonl", "--part", "1/2", "--resume").code == 0
    assert merge.main([f"{store}/out.jsonl"]) == 0
    assert capsys.readouterr().out == f"{store}/out.jsonl: 5 rows\n"
    found = objects()
    assert timeless(found["out.jsonl"]) == timeless(found["whole.jsonl"])
    assert found["out.jsonl.settings.json"] == found["whole.jsonl.settings.json"]
    assert found["out.jsonl.done"] == b"5\n"
    assert merge.main([f"{store}/out.jsonl"]) == 2 and "exists: remove it" in capsys.readouterr().err
    assert merge.main([f"{store}/none.jsonl"]) == 2 and "there are no parts of" in capsys.readouterr().err
    assert not list(tmp_path.glob("mars-jax-*"))


def test_an_object_of_another_run_is_refused_and_left_alone(decode, store):
    assert decode("out.jsonl").code == 0
    before = objects()
    assert "was begun with other seed" in decode("out.jsonl", "--resume", "--seed", 9).err
    put(f"{store}/in.jsonl", jsonl([{"prompt": "other"}]))
    assert "has more rows than there are prompts" in decode("out.jsonl", "--resume").err
    assert objects() | {"in.jsonl": b""} == before | {"in.jsonl": b""}


def test_the_mark_of_the_end_goes_before_more_rows_come(decode, store, monkeypatch):
    def write(url, data):
        if url.endswith("out.jsonl"):
            marked.append("out.jsonl.done" in objects())
        inner(url, data)

    assert decode("out.jsonl").code == 0
    inner, marked = remote.write, []
    monkeypatch.setattr(remote, "write", write)
    put(f"{store}/in.jsonl", jsonl({"prompt": f"prompt {i}"} for i in range(7)))
    assert decode("out.jsonl", "--resume").code == 0
    assert marked[0] is False and objects()["out.jsonl.done"] == b"7\n"


class Failing:
    """A store that refuses some of the writes of a name, by their numbers."""

    def __init__(self, monkeypatch, name, *refused):
        inner, self.seen = remote.write, []

        def write(url, data):
            if url.endswith(name):
                self.seen.append(data.count(b"\n"))
                if len(self.seen) in refused:
                    raise MarsError(f"'{url}' cannot be written (503): check the URL, and your rights there.")
            inner(url, data)

        monkeypatch.setattr(remote, "write", write)
        monkeypatch.setattr(uploaded_file, "SECONDS", 0.0)


def test_a_store_that_refuses_the_first_row_ends_the_run(decode, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failing = Failing(monkeypatch, "out.jsonl", 1)
    outcome = decode("out.jsonl")
    assert outcome.code == 2 and "out.jsonl' cannot be written (503): check" in outcome.err
    assert failing.seen == [1] and not list(tmp_path.iterdir())


def test_a_store_that_refuses_later_is_tried_again_and_no_row_is_lost(decode, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(uploaded_file, "SHARE", 1e9)  # uploads with every row
    failing = Failing(monkeypatch, "out.jsonl", 2, 3)
    outcome = decode("out.jsonl")
    assert outcome.code == 0 and "it is tried again" in outcome.err
    assert failing.seen == [1, 2, 3, 4, 5] and objects()["out.jsonl.done"] == b"5\n"

    Failing(monkeypatch, "lost.jsonl", 5, 6)
    outcome = decode("lost.jsonl")
    [kept] = tmp_path.glob("*/rows.jsonl")
    assert (
        outcome.code == 2 and f"until then all rows are in '{kept}', which you can copy there." in outcome.err
    )
    assert timeless(kept.read_bytes()) == timeless(objects()["out.jsonl"])
    assert "lost.jsonl.done" not in objects() and objects()["lost.jsonl"].count(b"\n") == 4


@pytest.mark.parametrize(
    "argv",
    [
        ["benchmark", "--task", "arithmetic", "--output", "gs://bucket/made"],
        ["benchmark", "--recipe", "qwen3-8b", "--output", "gs://bucket/made"],
        ["distill", "features", "--data", "text.txt", "--part", "0/2", "--output", "gs://bucket/made"],
        ["distill", "eagle3", "--output", "head", "--data", "text.txt", "--work", "gs://bucket/made"],
        ["calibrate", "--task", "arithmetic", "--output", "gs://bucket/made"],
        ["check", "--output", "gs://bucket/made"],
        ["convert", "tiny/target", "gs://bucket/made"],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_a_folder_that_is_a_url_is_refused_with_what_to_do(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.main(argv) == 2
    out, err = capsys.readouterr()
    assert (
        "'gs://bucket/made' is a URL: name a path of this machine, and copy what is there to the store" in err
    )
    assert out == "" and not list(tmp_path.iterdir())


# Signals.

ENDS = """
import os, sys
from mars_jax.__main__ import main
from mars_jax.serve import journal
inner = journal.Journal.append
def append(self, row):
    inner(self, row)
    appended.append(row)
    if len(appended) == 3:
        os.kill(os.getpid(), {number})
appended = []
journal.Journal.append = append
sys.exit(main("generate"))
"""


@pytest.mark.parametrize(
    ("where", "number", "word"),
    [
        ("{}", signal.SIGINT, "interrupted"),
        ("{}", signal.SIGTERM, "terminated"),
        ("file://{}", signal.SIGTERM, "terminated"),
    ],
    ids=["file-ctrl-c", "file-sigterm", "url-sigterm"],
)
def test_a_signal_keeps_the_finished_rows_and_the_run_resumes(where, number, word, run, target, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl({"prompt": f"prompt {i}"} for i in range(7)))
    output = where.format(tmp_path / "out.jsonl")
    argv = ["--target", target, *FEW, "--batch-size", 2, "--prompts-file", tmp_path / "in.jsonl"]
    argv = [str(a) for a in argv]
    command = [sys.executable, "-c", HEEDS, sys.executable, "-c", ENDS.format(number=int(number)), *argv]
    command += ["--output", output]
    made = tmp_path / "tmp"
    made.mkdir()
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"TMPDIR": str(made)},
    )  # fmt: skip
    assert ended.returncode == 128 + number
    [last] = [line for line in ended.stderr.splitlines() if line.startswith(word)]
    kept = (tmp_path / "out.jsonl").read_bytes()
    count = kept.count(b"\n")
    # The main thread may end a row before the other one closes the file.
    assert 3 <= count < 7 and kept.endswith(b"\n")
    assert last == f"{word} with {count} of 7 rows in '{output}': run it again with --resume to go on."
    assert not (tmp_path / "out.jsonl.done").exists() and not list(made.glob("mars-jax-*"))

    assert run(*argv, "--output", output, "--resume").code == 0
    assert run(*argv, "--output", tmp_path / "whole.jsonl").code == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)
    assert timeless((tmp_path / "out.jsonl").read_bytes()) == timeless(
        (tmp_path / "whole.jsonl").read_bytes()
    )
