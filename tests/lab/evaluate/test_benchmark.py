"""End-to-end tests of `mars-jax benchmark`: output files, resumption and refusals."""

import json
import shutil

import numpy as np
import pytest

from mars_jax import hub
from mars_jax.lab.commands.benchmark import parse
from mars_jax.lab.evaluate.benchmark import plots, report
from mars_jax.lab.evaluate.tasks.problems import Problem
from tests.lab.evaluate.conftest import call, read_folder

ARMS = [
    "autoregressive", "exact", "mars theta=0.9", "mars theta=0.5", "autoregressive top_k=2", "low-margin sampling",
]  # fmt: skip


@pytest.fixture
def refused(capsys):
    """Return a function that runs the command with bad input and returns the message on stderr."""

    def inner(*argv):
        capsys.readouterr()
        assert call(*argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        message = captured.err.splitlines()[-1]
        assert message.startswith("error: ") and message.endswith(".")
        return message

    return inner


# Output files.


def test_there_is_a_row_for_every_prompt_and_arm(finished):
    [table] = finished.summary["tables"]
    assert [a["arm"] for a in table["arms"]] == ARMS
    for arm in ARMS:
        rows = [row for row in finished.rows if row["arm"] == arm]
        assert [(row["id"], row["seed"]) for row in rows] == [("0", 0), ("1", 1), ("2", 2), ("3", 3)]
        assert all(0 < row["emitted"] == len(row["tokens"][0]) <= 12 for row in rows)
    assert len(finished.rows) == 4 * len(ARMS)


def test_progress_counts_every_decode_and_ends_at_its_total(finished):
    counts, totals, _ = zip(*finished.progress, strict=True)
    assert counts[-1] == len(finished.rows) and set(totals) == {len(finished.rows)}
    assert all(np.diff(counts) > 0)


def test_the_table_is_for_people(finished):
    text = (finished.path / "table.md").read_text()
    for arm in ARMS:
        assert f"| {arm} |" in text and f"- {arm}: " in text
    for picture in plots.PICTURES:
        assert f"({picture}.png)" in text
    [table] = finished.summary["tables"]
    [tau] = [arm["tau"] for arm in table["arms"] if arm["arm"] == "mars theta=0.9"]
    line = text[text.index("temperature 1\n") :].partition("| mars theta=0.9")[2]
    assert line.split("|")[1].strip() == f"{tau:.2f}"
    assert "ROUGE-L" in text and "Note: 2 problems were decoded in parallel" in text


def test_the_plots_are_not_blank(finished):
    from matplotlib import image

    for name in plots.PICTURES:
        picture = image.imread(finished.path / f"{name}.png")[..., :3]
        assert picture.shape[0] > 300 and picture.shape[1] > 500
        coloured = (picture.max(axis=-1) - picture.min(axis=-1)) > 0.2
        # Times place the marks, which overlap on a busy machine.
        assert coloured.mean() > 2e-4 and (picture < 0.5).any(axis=-1).mean() > 1e-3


@pytest.mark.slow
def test_plots_and_table_of_a_run_without_scores_and_thresholds(finished, tmp_path):
    summary = json.loads(json.dumps(finished.summary))
    for part in summary["tables"]:
        part["metric"] = "none"
        part["arms"] = part["arms"][:3]
        for arm in part["arms"]:
            arm |= {"score": None, "score_change": None, "recovered": None, "theta": None}
    plots.draw(summary, tmp_path, "a run", formats=("svg",))
    assert {file.stem for file in tmp_path.iterdir()} == {*plots.PICTURES} - {"tau_theta"}
    assert "tau_theta" not in report.markdown(summary)
    assert "regret, nats per token" in (tmp_path / "speed_quality.svg").read_text()
    assert "not scored" in report.markdown(summary)
    assert report.key(summary["tables"][0]) == ["arm", "tau", "tokens/s", "speed", "regret"]


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"finish_reason": "context"}, "In 1 rows a follow-up turn did not fit"),
        ({"chat": False}, {}, "Follow-up turns were left out"),
        ({"batch_size": 3}, {}, "3 problems were decoded in parallel"),
        ({}, {"date": "2026-11-25T01:00"}, "The rows were decoded on 2026-11-24, 2026-11-25: arms"),
        ({}, {"commit": "b"}, "by 2 versions of the code"),
        ({}, {"task": "mbpp"}, "Programs are not run here"),
    ],
)
def test_a_note_explains_rows_and_settings(changes, row, message):
    turns = Problem(task="mt_bench", id="0", turns=("One?", "Two?"))
    code = Problem(task="mbpp", id="0", turns=("Add.",), metric="pass@1")
    usual_row = {"task": "mt_bench", "finish_reason": "stop", "score": None}
    usual_row |= {"date": "2026-11-24T01:00", "commit": "a"}
    settings = {"chat": True, "batch_size": 1}
    assert report.notes(settings, [turns, code], [usual_row]) == []
    [note] = report.notes(settings | changes, [turns, code], [usual_row, usual_row | row])
    assert message in note


def test_a_humaneval_file_without_tests_is_noted():
    problem = Problem(task="humaneval", id="0", turns=("Complete it.",))
    [note] = report.notes({"chat": True, "batch_size": 1}, [problem], [])
    assert "has no tests" in note


@pytest.mark.parametrize("name", ["seed", "weights", "problems", "device"])
def test_a_run_with_other_settings_is_refused(flags, finished, refused, tmp_path, name):
    output = shutil.copytree(finished.path, tmp_path / "copy")
    settings = json.loads((output / "settings.json").read_text())
    (output / "settings.json").write_text(json.dumps(settings | {name: "other"}))
    assert f"was begun with {name} " in refused(*flags, "--output", output)
    assert (output / "rows.jsonl").read_bytes() == (finished.path / "rows.jsonl").read_bytes()


def test_a_folder_of_something_else_is_refused(flags, refused, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "holds other files" in refused(*flags, "--output", tmp_path)
    assert "is a file: name a folder" in refused(*flags, "--output", tmp_path / "thesis.tex")
    assert "is a URL: name a local path" in refused(*flags, "--output", "gs://bucket/out")


@pytest.mark.slow
def test_two_tasks_over_rejection(target, prompts, tmp_path):
    """The draft is sampled from its distribution, and one task is scored by likelihood."""
    stories = tmp_path / "stories.txt"
    stories.write_text("\n<|endoftext|>\n".join(["a b " * 30] * 3))
    flags = ["--target", target, "--draft", f"model:{target}", "--num-draft-tokens", 2, "--base", "rejection"]
    flags += ["--task", f"stories={stories}", "--task", f"jsonl={prompts}", "--problems", 3]
    flags += ["--batch-size", 3, "--max-new-tokens", 12, "--controls", "all"]
    assert call(*flags, "--output", tmp_path / "output") == 0
    folder = read_folder(tmp_path / "output")
    tables = [(t["task"], t["temperature"]) for t in folder.summary["tables"]]
    assert tables == [("stories", 0.0), ("stories", 1.0), ("jsonl", 0.0), ("jsonl", 1.0)]
    for part in folder.summary["tables"]:
        names = [a["arm"] for a in part["arms"]]
        assert names[1:3] == ["rejection", "mars over rejection theta=0.9"]
        assert part["arms"][1]["tau"] > 2  # at most 3: the target drafts for itself, so q = p
    sizes = {(row["task"], len(row["score"])) for row in folder.rows}
    assert sizes == {("stories", 2), ("jsonl", 1)}
    stories = folder.summary["tables"][0]["arms"]
    # A tiny random model is nearly uniform over its vocabulary, so relaxed tokens are no less likely than others.
    assert all(0 < arm["score"] < 1 for arm in stories) and stories[0]["recovered"] == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--thetas 2", "--thetas is 2: expected a number above 0 and at most 1 for the margin ratio"),
        ("--thetas inf", "--thetas has inf, which is the strict rule"),
        ("--thetas 0.9 0.90", "--thetas has a value twice"),
        ("--temperatures 0 -0", "--temperatures has a value twice"),
        ("--temperatures -1", "--temperatures is -1: expected a finite number"),
        ("--draft none", "--draft is none: expected ngram"),
        ("--theta 0.9", "unrecognized arguments: --theta"),
        ("--rule-option theta=0.9", "--rule-option theta does not apply here: give --thetas"),
        ("--verify exact --thetas 0.9", "--thetas does not apply to the rule exact"),
        ("--verify simulated", "--verify simulated does not apply here, as its text is meaningless"),
        ("--verify gates.py:gate", "the file of a rule 'gates.py' cannot be read"),
        ("--task arithmetic", "--task names a task twice"),
        ("--task chess=x", "there is no task 'chess'"),
        ("--chat", "has no chat template: leave --chat out"),
        ("--target tiny/target --draft eagle:nowhere", "there is no directory 'nowhere'"),
        ("--target tiny/target --draft replay:nowhere", "replay:nowhere, and there is no such file: check"),
        ("--refine nowhere", "--refine is nowhere, and there is no such file: check the path."),
    ],
)
def test_bad_flags_are_refused_before_weights_load(refused, target, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(hub, "load", None)
    common = ["--target", target, "--draft", f"model:{target}", "--task", "arithmetic"]
    assert message in refused(*common, "--output", tmp_path / "output", *flags.split())
    assert not (tmp_path / "output").exists()


def test_what_must_be_there(refused, tmp_path):
    assert "there is no --output" in refused("--task", "arithmetic")
    assert "there is no --task" in refused("--output", tmp_path)
    chat = refused("--task", "stories=x", "--chat", "--output", tmp_path / "o")
    assert "--chat does not apply to stories" in chat


def test_a_recipe_has_a_folder_that_can_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    leads = refused("--recipe", "embedded", "--output", tmp_path / "file")
    assert f"'{tmp_path}/file/paper' leads through" in leads


def test_a_problem_that_does_not_fit_is_named(refused, target, tmp_path):
    message = refused("--target", target, "--task", "arithmetic", "--output", tmp_path / "output")
    assert "arithmetic, problem " in message and "a context of 64" in message
    assert not (tmp_path / "output").exists()


def test_the_default_is_the_embedded_family():
    args = parse(["--task", "arithmetic", "--output", "o"])
    assert (args.target, args.draft) == ("tiny/target", "model:tiny/draft")
    assert args.temperatures == [0.0, 1.0] and args.thetas is None and args.batch_size == 1
    assert args.controls == "paper"
    assert parse(["--target", "x", "--task", "arithmetic", "--output", "o"]).draft == "ngram"
    assert parse(["--task", "a", "--output", "o", "--margin", "gap", "--thetas", "2"]).thetas == [2.0]
