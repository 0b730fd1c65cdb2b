"""Prompts from parquet files, datasets and object stores; URLs as outputs; and signals that end a run."""

import datetime
import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mars_jax
from mars_jax.cli import commands
from mars_jax.cli.generate.prompts import read_prompts
from mars_jax.utils.errors import MarsError
from mars_jax.verify import RuleChoice
from tests.cli.conftest import timeless
from tests.helpers.shell import LAUNCHER

ROOT = Path(mars_jax.__file__).parents[1]
MARS = RuleChoice("mars", {})
FEW = ["--draft", "none", "--max-new-tokens", "8", "--temperature", "1"]
PROMPTS = [
    {"prompt": "the sea"},
    {"messages": [{"role": "user", "content": "A\u2028line"}], "id": 7},
    {"prompt_tokens": [5, 6], "temperature": 0.5, "stop_strings": ["x"], "theta": 0.8},
]


@pytest.fixture
def store():
    """Yield the URL of an empty in-memory folder."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield "memory://runs"
    memory.store.clear()


def put(url, data):
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    system.pipe_file(path, data)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def fields_of(rows):
    return [(row.prompt, row.messages, row.tokens, row.id, row.settings, row.numbers) for row in rows]


# Prompts.


def test_prompts_are_the_same_from_jsonl_and_parquet_here_and_in_a_store(tmp_path, store, capsys):
    columns = {key: None for row in PROMPTS for key in row}
    table = parquet([columns | row for row in PROMPTS])
    (tmp_path / "in.jsonl").write_bytes(jsonl(PROMPTS))
    (tmp_path / "in.parquet").write_bytes(table)
    expected = fields_of(read_prompts(str(tmp_path / "in.jsonl"), MARS))
    assert [row[3] for row in expected] == [None, 7, None]
    for name, data in (("in.jsonl", jsonl(PROMPTS)), ("in.parquet", table)):
        put(f"{store}/{name}", data)
        for path in (str(tmp_path / name), f"{store}/{name}", f"file://{tmp_path / name}"):
            assert fields_of(read_prompts(path, MARS)) == expected, path
    put(f"{store}/in.txt", b"one\n\ntwo\n")
    assert [row.prompt for row in read_prompts(f"{store}/in.txt", MARS)] == ["one", "two"]
    assert capsys.readouterr().err == ""


def test_columns_of_a_dataset_that_are_no_keys_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "published"
    folder.mkdir()
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    columns = {"category": "math", "choice": "A", "messages": turns}
    rows = [{"prompt": f"p{i}", "id": i, "seed": i, **columns} for i in range(2)]
    (folder / "train.jsonl").write_bytes(jsonl(rows))
    prompts = read_prompts(str(folder), MARS)
    assert [(row.prompt, row.id, row.settings) for row in prompts] == [("p0", 0, {}), ("p1", 1, {})]
    note = f"other columns of '{folder}' are ignored: category, choice, messages, seed."
    assert note in capsys.readouterr().err
    (folder / "train.jsonl").write_bytes(jsonl([{"question": "Why?", "answer": "So."}]))
    with pytest.raises(MarsError, match="columns are question, answer, and none of prompt, messages"):
        read_prompts(str(folder), MARS)
    (folder / "train.jsonl").write_bytes(jsonl([{"prompt": "fine"}, {"prompt": 5}]))
    with pytest.raises(MarsError, match="row 1: prompt is 5"):
        read_prompts(str(folder), MARS)


def test_what_cannot_be_read_is_one_sentence(tmp_path, store, refused, monkeypatch):
    def message(path):
        return refused("--prompts-file", path)

    (tmp_path / "torn.parquet").write_bytes(parquet([{"prompt": "a"}])[:-9])
    assert "torn.parquet' cannot be read (" in message(tmp_path / "torn.parquet")
    put(f"{store}/odd.parquet", parquet([{"prompt": "a", "temprature": 1.0}]))
    assert "odd.parquet, row 0: unknown key 'temprature' (did you mean" in message(f"{store}/odd.parquet")
    index = [{"prompt": "a", "max_new_tokens": x, "__index_level_0__": 5} for x in (8.0, None)]
    put(f"{store}/pandas.parquet", parquet(index))
    rows = read_prompts(f"{store}/pandas.parquet", MARS)
    assert [row.settings for row in rows] == [{"max_new_tokens": 8}, {}]
    assert "there is no prompts file" in message(tmp_path / "in.JSONL")
    put(f"{store}/day.parquet", parquet([{"prompt": "a", "id": datetime.date(2026, 1, 1)}]))
    assert "day.parquet, row 0: id is of a type that JSON does not have" in message(f"{store}/day.parquet")
    assert f"there is no prompts file '{store}/none.jsonl'" in message(f"{store}/none.jsonl")
    assert "cannot be read (Protocol not known: nowhere): check URL" in message("nowhere://b/in.jsonl")
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    assert "needs a package (Please install gcsfs" in message("gs://bucket/in.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs the package pyarrow: pip install pyarrow." in message(tmp_path / "torn.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "need the package datasets: pip install datasets." in message("owner/name")


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--output", "gs://bucket/made", "hello"],
        ["benchmark", "--task", "arithmetic", "--output", "gs://bucket/made"],
        ["distill", "features", "--data", "text.txt", "--output", "gs://bucket/made"],
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
    assert "'gs://bucket/made' is a URL: name a local path, and copy the result to the store" in err
    assert out == "" and not list(tmp_path.iterdir())


# Signals.

ENDS = """
import itertools, os, sys
from mars_jax.__main__ import main
from mars_jax.serve.rows import RowFile
inner, count = RowFile.append, itertools.count(1)
def append(self, row):
    inner(self, row)
    if next(count) == 3:
        os.kill(os.getpid(), {number})
RowFile.append = append
sys.exit(main("generate"))
"""


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "interrupted"), pytest.param(signal.SIGTERM, "terminated", marks=pytest.mark.slow)],
)
def test_a_signal_keeps_the_finished_rows_and_the_run_resumes(number, word, run, target, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl({"prompt": f"prompt {i}"} for i in range(7)))
    output = str(tmp_path / "out.jsonl")
    argv = ["--target", str(target), *FEW, "--batch-size", "2"]
    argv += ["--prompts-file", str(tmp_path / "in.jsonl")]
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", ENDS.format(number=int(number)), *argv]
    process = subprocess.run([*command, "--output", output], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 128 + number
    [last] = [line for line in process.stderr.splitlines() if line.startswith(word)]
    resumed, uninterrupted = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    written = resumed.read_bytes()
    count = written.count(b"\n")
    # The main thread may finish more rows before the other thread closes the file.
    assert 3 <= count < 7 and written.endswith(b"\n")
    assert last == f"{word} with {count} of 7 rows in '{output}': run it again with --resume to continue."

    assert run(*argv, "--output", output, "--resume").code == 0
    assert run(*argv, "--output", uninterrupted).code == 0
    assert resumed.read_bytes().startswith(written)
    assert timeless(resumed.read_text()) == timeless(uninterrupted.read_text())
