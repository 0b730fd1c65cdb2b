"""Answers that several runs of `mars-jax lm_eval` make are those of one: `--rows`, `--part`, and `mars-jax merge`."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval")

from mars_jax.cli import merge
from mars_jax.integrations import harness, lm_eval
from tests.cli.conftest import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and what it imports warn of themselves

TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: "{{prompt}}"
"""
TASKS = {
    "said": """
task: said
output_type: generate_until
doc_to_target: "{{prompt}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: 6, do_sample: true, temperature: 1.0}
metric_list: [{metric: exact_match}]
repeats: 2
""",
    "chosen": """
task: chosen
output_type: multiple_choice
doc_to_choice: [" sea", " sun and the story"]
doc_to_target: 1
metric_list: [{metric: acc}]
""",
    "rolled": """
task: rolled
output_type: loglikelihood_rolling
doc_to_target: "{{prompt}}"
metric_list: [{metric: bits_per_byte}]
""",
}
PROMPTS = ["the sea", "a story of", "sun", "the sea and the sun of a story " * 3, "and"]
ASKED = 10 + 10 + 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("lm_eval")
    write_checkpoint(made / "target", seed=0)
    (made / "docs.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    for name, task in TASKS.items():
        (made / f"{name}.yaml").write_text((TASK + task).replace("FILE", str(made / "docs.jsonl")))
    return made


@pytest.fixture
def evaluate(folder, capsys, monkeypatch):
    def run(*flags, seed=0, code=0):
        argv = ["--model", "mars_jax", "--model_args", f"target={folder / 'target'},draft=ngram,seed={seed}"]
        argv += ["--tasks", *TASKS, "--include_path", str(folder), "--batch_size", "2", *map(str, flags)]
        monkeypatch.setattr("sys.argv", ["mars-jax"])
        assert lm_eval.main(argv) == code
        said = capsys.readouterr()
        if code:
            return said.err.splitlines()[-1]
        return said.out[max(said.out.find("|Tasks"), 0) :]  # without the line that repeats the arguments

    return run


def test_rows_of_parts_are_those_of_one_run_and_have_its_scores(folder, evaluate, capsys, monkeypatch):
    def refused(path):
        assert merge.main([str(path)]) == 2
        return capsys.readouterr().err

    table = evaluate()
    whole, out = folder / "whole.jsonl", folder / "out.jsonl"
    assert evaluate("--rows", whole) == table and "bits_per_byte" in table

    def killed(*_, **__):
        raise KeyboardInterrupt

    parts = [folder / f"out-0000{number}-of-00003.jsonl" for number in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(harness.MarsJax, "loglikelihood_rolling", killed)
        evaluate("--rows", out, "--part", "1/3", code=130)
    kept = parts[1].read_bytes()
    assert 0 < kept.count(b"\n") < ASKED // 3
    parts[1].write_bytes(kept[:-20])
    for number in (0, 2):
        share = len(range(ASKED)[number::3])
        assert evaluate("--rows", out, "--part", f"{number}/3") == f"{parts[number]}: {share} of {ASKED} rows\n"
    assert f"'{parts[1]}' is unfinished: run it again with --part 1/3, and it goes on." in refused(out)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("JOB_COMPLETIONS", "3")
    evaluate("--rows", out, "--part", "auto")
    assert parts[1].read_bytes().startswith(kept)

    assert merge.main([str(out)]) == 0
    assert out.read_bytes() == whole.read_bytes()
    beside = [file.with_name(f"{file.name}.settings.json").read_bytes() for file in (out, whole)]
    assert beside[0] == beside[1]
    # The scores are of the rows alone.
    monkeypatch.setattr(harness, "score", None)
    monkeypatch.setattr(harness.Session, "queue", None)
    assert evaluate("--rows", out) == table


def test_rows_of_another_run_are_refused_by_what_differs(folder, evaluate):
    rows = folder / "own.jsonl"
    evaluate("--rows", rows, "--limit", "2")
    kept = rows.read_bytes()
    assert f"'{rows}' was begun with other seed (0 and not 1)" in evaluate("--rows", rows, seed=1, code=2)
    told = evaluate("--rows", rows, "--limit", "3", code=2)
    assert f"line 5 of '{rows}' does not answer this run's request: choose another --rows" in told
    assert f"'{rows}' has more rows than this run has requests" in evaluate(
        "--rows", rows, "--limit", "2", "--tasks", "said", code=2
    )
    rows.write_bytes(kept[:-1] + b", ")
    assert "the last line of" in evaluate("--rows", rows, "--limit", "2", code=2)
    rows.with_name("own.jsonl.settings.json").unlink()
    assert "is damaged or missing" in evaluate("--rows", rows, "--limit", "2", code=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--part", "0/2"], "part does not apply without rows, the file of its answers: add it."),
        (["--rows", "rows.jsonl", "--part", "2/2"], "--part is '2/2': expected auto, or I/N"),
        (["--rows", "gs://bucket/rows.jsonl"], "rows is 'gs://bucket/rows.jsonl': give a path of this machine"),
        (["--part", "0/2", "--config", "run.yaml"], "--part does not apply with --config: put it among its model_args"),
    ],
)
def test_flags_that_cannot_be_are_named(flags, message, evaluate):
    assert message in evaluate(*flags, code=2)


def test_the_cache_of_the_harness_and_parts_without_rows_are_refused(folder, evaluate):
    rows = ["--rows", folder / "more.jsonl"]
    assert "--use_cache does not apply with rows" in evaluate(*rows, "--use_cache", folder / "cache", code=2)
    told = evaluate(*rows, "--part", "7/9", "--limit", "1", "--tasks", "said", code=2)
    assert "--part 7/9 has none of the 2 rows: take fewer parts." in told
