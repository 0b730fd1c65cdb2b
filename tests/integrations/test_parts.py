"""Tests of `mars-jax lm_eval --part`: rows of parts, scored by a last run, give the results of a single run."""

import json

import pytest

pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager

from mars_jax import hub
from mars_jax.integrations import harness, lm_eval
from mars_jax.serve.session import Session
from tests.cli.conftest import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and its imports emit warnings

TASKS = {
    "said": {"output_type": "generate_until", "doc_to_target": "{{prompt}}", "repeats": 2}
    | {"generation_kwargs": {"until": ["STOP"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}}
    | {"metric_list": [{"metric": "exact_match"}]},
    "chosen": {"output_type": "multiple_choice", "doc_to_choice": [" sea", " sun and the story"]}
    | {"doc_to_target": 1, "metric_list": [{"metric": "acc"}]},
    "rolled": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{prompt}}"}
    | {"metric_list": [{"metric": "bits_per_byte"}]},
}
PROMPTS = ["the sea", "a story of", "sun", "the sea and the sun of a story " * 3, "and"]
ASKED = 10 + 10 + 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lm_eval")
    write_checkpoint(root / "target", seed=0)
    file = root / "docs.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
    shared |= {"test_split": "test", "doc_to_text": "{{prompt}}"}
    for name, task in TASKS.items():
        (root / f"{name}.yaml").write_text(json.dumps({"task": name} | shared | task))
    return root


@pytest.fixture
def evaluate(folder, capsys, monkeypatch):
    original = TaskManager.__init__

    def without_defaults(*arguments, **options):
        original(*arguments, **options | {"include_defaults": False})

    # Listing the harness's thousands of tasks takes seconds.
    monkeypatch.setattr(TaskManager, "__init__", without_defaults)

    def run(*flags, code=0):
        argv = ["--model", "mars_jax", "--model_args", f"target={folder / 'target'},draft=ngram"]
        argv += ["--tasks", *TASKS, "--include_path", str(folder), "--batch_size", "2", *map(str, flags)]
        monkeypatch.setattr("sys.argv", ["mars-jax"])
        assert lm_eval.main(argv) == code
        captured = capsys.readouterr()
        if code:
            return captured.err.splitlines()[-1]
        return captured.out[max(captured.out.find("|Tasks"), 0) :]  # drop the line that repeats the arguments

    return run


def test_rows_of_parts_have_the_scores_of_one_run(folder, evaluate, monkeypatch):
    table = evaluate()
    single, out = folder / "whole.jsonl", folder / "out.jsonl"
    assert evaluate("--rows", single) == table and "bits_per_byte" in table

    def killed(*_, **__):
        raise KeyboardInterrupt

    parts = [folder / f"part-{number}.jsonl" for number in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(harness.utils, "get_rolling_token_windows", killed)
        evaluate("--rows", parts[1], "--part", "1/2", code=130)
    first_rows = parts[1].read_bytes()
    assert 0 < first_rows.count(b"\n") < ASKED // 2
    parts[1].write_bytes(first_rows[:-20])
    evaluate("--rows", parts[1], "--part", "1/2")
    assert parts[1].read_bytes().startswith(first_rows)
    assert evaluate("--rows", parts[0], "--part", "0/2") == f"{parts[0]}: 13 of {ASKED} rows\n"

    rows = [line for part in parts for line in part.read_bytes().splitlines()]
    assert sorted(rows) == sorted(single.read_bytes().splitlines())
    out.write_bytes(b"\n".join(rows) + b"\n")
    # The scores come from the rows, without a step of the model.
    monkeypatch.setattr(harness, "score", None)
    monkeypatch.setattr(Session, "queue", None)
    assert evaluate("--rows", out) == table


def test_rows_of_other_requests_and_settings_are_refused(folder, evaluate):
    rows = folder / "other.jsonl"
    evaluate("--rows", rows)
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(lines[0].replace(b'"id": 0', b'"id": 4') + lines[0])
    assert "row 4 of '" in evaluate("--rows", rows, code=2)
    assert "was begun with " in evaluate("--rows", rows, "--model_args", "seed=3", code=2)
    cached = evaluate("--rows", folder / "more.jsonl", "--use_cache", folder / "cache", code=2)
    assert "--use_cache does not apply with rows" in cached
    assert "--part has none of the" in evaluate("--rows", folder / "none.jsonl", "--part", "98/99", code=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows"], "--rows: expected one argument"),
        (["--part", "0/2"], "part does not apply without rows, the file of its answers: add it."),
        (["--rows", "rows.jsonl", "--part", "2/2"], "--part is '2/2': expected I/N"),
        (["--rows", "gs://bucket/rows.jsonl"], "rows 'gs://bucket/rows.jsonl' is a URL: name a local path"),
        (["--model_args", "draft=eagle:nowhere"], "there is no directory 'nowhere'"),
        (["--model_args", "max_gen_toks=0"], "max_gen_toks is 0: expected a whole number of at least 1"),
        (["--rows", "/"], "--rows '/' is not a regular file: choose another path."),
        (["--part", "0/2", "--config", "run.yaml"], "--part does not apply with --config: put it among its"),
    ],
)
def test_flags_that_cannot_be_are_named_before_anything_loads(flags, message, evaluate, monkeypatch):
    monkeypatch.setattr(hub, "load", None)
    assert message in evaluate(*flags, code=2)


def test_help_has_our_flags_and_those_of_the_harness(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mars-jax"])
    with pytest.raises(SystemExit) as ended:
        lm_eval.main(["run", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    theirs = out.index("the flags of lm-evaluation-harness")
    assert out.index("--rows FILE") < out.index("answer only requests I, I + N") < theirs
