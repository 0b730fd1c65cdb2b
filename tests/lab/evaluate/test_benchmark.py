"""`mars-jax benchmark` from end to end: its files, its resume, its refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mars_jax import hub
from mars_jax.core.errors import MarsError
from mars_jax.lab.commands.benchmark import main, parse, parser
from mars_jax.lab.evaluate import answers
from mars_jax.lab.evaluate.benchmark import plots, report, tables
from mars_jax.lab.evaluate.benchmark.arms import CONTROLS
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows
from mars_jax.lab.pictures import FORMATS
from mars_jax.serve.rows import Lock
from tests.lab.evaluate.conftest import dying_after, read_folder, timeless

ROOT = Path(__file__).parents[3]
DRAWN = {f"{name}.{kind}" for name in plots.PICTURES for kind in FORMATS}
ARMS = [
    "autoregressive", "exact", "mars theta=0.9", "mars theta=0.5", "autoregressive top_k=2", "low-margin sampling",
]  # fmt: skip


def call(*argv):
    return main([str(a) for a in argv])


@pytest.fixture
def refused(capsys):
    """Call with bad input; returns the sentence on stderr."""

    def inner(*argv):
        capsys.readouterr()
        assert call(*argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        message = captured.err.splitlines()[-1]
        assert message.startswith("error: ") and message.endswith(".")
        return message

    return inner


def rows_of(finished, arm, temperature):
    return [row for row in finished.rows if (row["arm"], row["temperature"]) == (arm, temperature)]


def arm_of(finished, arm, temperature):
    [table] = [t for t in finished.summary["tables"] if t["temperature"] == temperature]
    return next(a for a in table["arms"] if a["arm"] == arm)


# What it writes.


def test_there_is_a_row_for_every_prompt_and_arm(finished):
    for temperature, arms in ((0.0, [a for a in ARMS if "top_k" not in a]), (1.0, ARMS)):
        assert [
            a["arm"] for t in finished.summary["tables"] if t["temperature"] == temperature for a in t["arms"]
        ] == arms
        for arm in arms:
            rows = rows_of(finished, arm, temperature)
            assert [row["id"] for row in rows] == ["0", "1", "2", "3"]
            assert [row["seed"] for row in rows] == [0, 1, 2, 3]
            assert all(
                0 < len(row["tokens"][0]) <= 12 and row["emitted"] == len(row["tokens"][0]) for row in rows
            )
    assert len(finished.rows) == 4 * (5 + 6)


def test_batches_run_arm_by_arm(finished):
    """Some batches of each in turn, so that a slow spell strikes all of them."""
    first = [(row["arm"], row["id"]) for row in finished.rows[:8]]
    assert first == [("autoregressive", i) for i in "0123"] + [("exact", i) for i in "0123"]


def test_progress_counts_every_decode_and_ends_at_its_total(finished):
    done, totals, _ = zip(*finished.progress, strict=True)
    assert done[-1] == len(finished.rows) and set(totals) == {len(finished.rows)}
    assert all(np.diff(done) > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("controls", "arms"),
    [
        ("none", ["autoregressive", "mars theta=0.9", "mars theta=0.5"]),
        ("paper", ["autoregressive", "exact", "mars theta=0.9", "mars theta=0.5"]),
    ],
)
def test_fewer_controls_are_fewer_arms_with_the_same_rows(flags, finished, tmp_path, controls, arms):
    assert call(*flags, "--controls", controls, "--temperatures", 1, "--output", tmp_path / "out") == 0
    run = read_folder(tmp_path / "out")
    [table] = run.summary["tables"]
    assert [arm["arm"] for arm in table["arms"]] == arms
    for arm in arms:
        rows, all_rows = (timeless(rows_of(folder, arm, 1.0)) for folder in (run, finished))
        for row in rows + all_rows:
            row.pop("fingerprint")  # of the settings, which differ in `controls`
        assert rows == all_rows
        same = [timeless(arm_of(folder, arm, 1.0)) for folder in (run, finished)]
        if controls == "none":
            assert same[0].pop("same_as_strict") is None and same[1].pop("same_as_strict") is not None
        assert same[0] == same[1]
    assert {file.name for file in run.path.iterdir()} >= DRAWN
    assert run.summary["settings"]["controls"] == controls


def test_the_strict_arm_is_lossless(finished):
    assert [row["tokens"] for row in rows_of(finished, "autoregressive", 0.0)] == [
        row["tokens"] for row in rows_of(finished, "exact", 0.0)
    ]
    assert arm_of(finished, "exact", 0.0)["same_as_autoregressive"] == 1.0


def test_the_rule_relaxes(finished):
    exact, loose = (arm_of(finished, name, 1.0) for name in ("exact", "mars theta=0.5"))
    assert exact["relaxed_share"] == 0 < loose["relaxed_share"] and exact["tau"] < loose["tau"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("arm", ["autoregressive", "mars theta=0.5"])
def test_figures_by_hand(finished, arm, temperature):
    rows, alone = rows_of(finished, arm, temperature), rows_of(finished, "autoregressive", temperature)
    made = arm_of(finished, arm, temperature)
    tokens = sum(len(row["tokens"][0]) for row in rows)
    accepted = sum(row["accepted_exact"] + row["accepted_relaxed"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    assert made["problems"] == 4
    assert made["tau"] == pytest.approx(tokens / sum(row["steps"] for row in rows))
    assert made["relaxed_share"] == pytest.approx(
        sum(row["accepted_relaxed"] for row in rows) / max(accepted, 1)
    )
    assert made["regret_per_token"] == pytest.approx(sum(row["regret"] for row in rows) / tokens)
    assert made["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert made["seconds_per_task"] == pytest.approx(seconds / 4)
    assert made["tokens_per_task"] == tokens / 4
    assert made["loop_rate"] == sum(row["loops"] for row in rows) / 4
    assert made["length_rate"] == sum(row["finish_reason"] == "length" for row in rows) / 4
    assert made["score"] == pytest.approx(sum(row["score"][0] for row in rows) / 4)
    baseline = sum(row["score"][0] for row in alone)
    expected = sum(row["score"][0] for row in rows) / baseline if baseline else None
    assert made["recovered"] == (None if expected is None else pytest.approx(expected))
    speed = sum(len(row["tokens"][0]) for row in alone) / sum(row["seconds"] for row in alone)
    assert made["speedup"] == pytest.approx(tokens / seconds / speed)
    deep = [sum(row["depth_histogram"][d] for row in rows) for d in range(len(rows[0]["depth_histogram"]))]
    assert made["depth_histogram"] == deep
    for depth, rate in enumerate(made["acceptance_by_depth"]):
        reached = sum(deep[depth:])
        assert rate == (pytest.approx(sum(deep[depth + 1 :]) / reached) if reached else None)


def test_the_table_is_for_people(finished):
    text = (finished.path / "table.md").read_text()
    for arm in ARMS:
        assert f"| {arm} |" in text and f"- {arm}: " in text
    for picture in plots.PICTURES:
        assert f"({picture}.png)" in text
    tau = arm_of(finished, "mars theta=0.9", 1.0)["tau"]
    [line] = [
        line
        for line in text[text.index("temperature 1\n") :].splitlines()
        if line.startswith("| mars theta=0.9")
    ][:1]
    assert line.split("|")[2].strip() == f"{tau:.2f}"
    assert "ROUGE-L" in text and "Note: 3 problems were decoded side by side" in text


def test_the_plots_are_not_blank(finished):
    from matplotlib import image

    for name in plots.PICTURES:
        picture = image.imread(finished.path / f"{name}.png")[..., :3]
        assert picture.shape[0] > 300 and picture.shape[1] > 1000  # two panels
        for panel in np.array_split(picture, 2, axis=1):
            coloured = (panel.max(axis=-1) - panel.min(axis=-1)) > 0.2
            assert coloured.mean() > 1e-3 and (panel < 0.5).any(axis=-1).mean() > 1e-3


@pytest.mark.slow
def test_plots_and_table_of_a_run_without_scores_and_thresholds(finished, tmp_path):
    summary = json.loads(json.dumps(finished.summary))
    for part in summary["tables"]:
        part["metric"] = "none"
        part["arms"] = part["arms"][:3]
        for arm in part["arms"]:
            arm |= {"score": None, "score_change": None, "recovered": None, "theta": None}
    plots.draw(summary, tmp_path, "a run", formats=("svg",))
    assert {file.stem for file in tmp_path.iterdir()} == set(plots.PICTURES)
    assert "regret, nats per token" in (tmp_path / "speed_quality.svg").read_text()
    assert "not scored" in tables.markdown(summary)
    assert tables.key(summary["tables"][0]) == ["arm", "tau", "tokens/s", "speed", "regret"]


def test_notes_say_what_the_figures_do_not(finished):
    settings = finished.summary["settings"] | {"batch_size": 1, "chat": False}
    told = Problem(task="mt_bench", id="0", turns=("One?", "Two?"))
    bare = Problem(task="humaneval", id="0", turns=("Complete it.",))
    notes = report.notes(settings, [told, bare])
    notes += report.notes_of_rows([{"finish_reason": "context"}])
    words = (
        "Follow-up turns were left out",
        "has no tests",
        "In 1 rows a follow-up turn",
    )
    assert len(notes) == 3 and all(word in note for word, note in zip(words, notes, strict=True))
    assert (
        report.notes(settings | {"chat": True}, [told])
        == report.notes_of_rows([{"finish_reason": "stop"}])
        == []
    )
    rows = [{"finish_reason": "stop", "date": f"2026-11-2{day}T01:00", "commit": "a"} for day in (4, 4, 5)]
    [days] = report.notes_of_rows(rows)
    assert days.startswith(
        "The rows were decoded on 2 days (2026-11-24, 2026-11-25): arms that were timed apart"
    )


# Killed and run again.


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "torn"), [(0, 0), (3, 0), (8, 500), (9, 1)])
def test_a_killed_run_goes_on_where_it_was(flags, finished, tmp_path, monkeypatch, capsys, groups, torn):
    """Killed at once or in the middle, and with some bytes of the last row not on disk."""
    output = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(answers, "_decoded", dying_after(groups))
        assert call(*flags, "--output", output) == 130
    assert not (output / "summary.json").exists()
    rows = output / "rows.jsonl"
    if torn:
        before = rows.read_bytes()
        assert len(before.splitlines()) < len(finished.rows)
        rows.write_bytes(before[:-torn])
    kept = b"".join(rows.read_bytes().rpartition(b"\n")[:2]) if rows.exists() else b""
    if torn == 500:
        assert kept.count(b"\n") % 4  # a row and a piece of the next are gone, out of a group of four
    assert call(*flags, "--output", output) == 0
    assert rows.read_bytes().startswith(kept)
    again = read_folder(output)
    assert timeless(again.rows) == timeless(finished.rows)
    assert timeless(again.summary) == timeless(finished.summary)
    assert sorted(p.name for p in output.iterdir()) == sorted(p.name for p in finished.path.iterdir())


ENDS = """
import os, signal, sys
from mars_jax.__main__ import main
from mars_jax.serve.rows import RowFile
inner = RowFile.append
def append(self, row):
    inner(self, row)
    os.kill(os.getpid(), signal.SIGTERM)
RowFile.append = append
sys.exit(main("benchmark"))
"""


@pytest.mark.slow
def test_sigterm_says_how_to_go_on(flags, tmp_path):
    argv = [str(a) for a in (*flags, "--controls", "none", "--output", tmp_path / "out")]
    ended = subprocess.run([sys.executable, "-c", ENDS, *argv], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 143
    last = f"terminated: '{tmp_path / 'out'}' has the finished rows; run the same command again to continue."
    assert ended.stderr.splitlines()[-1] == last
    assert (tmp_path / "out" / "rows.jsonl").read_bytes().count(b"\n") >= 1


def test_a_folder_is_one_process_at_a_time(flags, finished, refused, tmp_path):
    output = shutil.copytree(finished.path, tmp_path / "copy")
    lock = Lock(output / "rows.jsonl")
    message = refused(*flags, "--output", output)
    assert f"another process is writing to '{output / 'rows.jsonl'}'" in message
    lock.close()


@pytest.mark.slow
def test_rows_with_a_tail_of_nul_bytes_go_on(flags, finished, tmp_path):
    """After a power cut a file may have its length and not its bytes."""
    output = shutil.copytree(finished.path, tmp_path / "copy")
    rows = (output / "rows.jsonl").read_bytes()
    (output / "rows.jsonl").write_bytes(rows[:-40] + b"\0" * 40)
    assert call(*flags, "--output", output) == 0
    assert timeless(read_folder(output).rows) == timeless(finished.rows)


def test_a_kill_while_the_settings_are_written_blocks_nothing(tmp_path):
    (tmp_path / "settings.json.partial").write_text('{"tar')
    open_rows(tmp_path, {"seed": 1}).close()
    file = open_rows(tmp_path, {"seed": 1})
    file.append({"id": "0"})
    file.close()
    with pytest.raises(MarsError, match="was begun with seed 1, not 2"):
        open_rows(tmp_path, {"seed": 2})


@pytest.mark.slow
def test_a_finished_run_decodes_nothing_and_prints_its_table(flags, finished, tmp_path, monkeypatch, capsys):
    output = shutil.copytree(finished.path, tmp_path / "copy")
    made = ("summary.json", "table.md", "report.html", *DRAWN)
    for name in made:
        (output / name).unlink()
    monkeypatch.setattr(answers, "_decoded", lambda *args, **options: pytest.fail("decoded"))
    capsys.readouterr()
    assert call(*flags, "--output", output) == 0
    for name in made:
        assert (output / name).read_bytes() == (finished.path / name).read_bytes()
    captured = capsys.readouterr()
    assert captured.out == (finished.path / "table.md").read_text()
    assert "rows, table, plots and report are in" in captured.err


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (["--thetas", "0.9"], "thetas"),
        (["--seed", "1"], "seed"),
        (["--problems", "3"], "tasks"),
        (["--dtype", "bfloat16"], "dtype"),
    ],
)
def test_a_run_with_other_settings_is_refused(flags, finished, refused, tmp_path, changed, name):
    output = shutil.copytree(finished.path, tmp_path / "copy")
    before = (output / "rows.jsonl").read_bytes()
    message = refused(*flags, *changed, "--output", output)
    assert f"was begun with {name} " in message and "choose another --output" in message
    assert (output / "rows.jsonl").read_bytes() == before


def test_other_weights_and_other_prompts_are_refused(flags, finished, refused, tmp_path):
    output = shutil.copytree(finished.path, tmp_path / "copy")
    settings = json.loads((output / "settings.json").read_text())
    for name in ("weights", "problems", "device"):
        (output / "settings.json").write_text(json.dumps(settings | {name: "other"}))
        assert f"was begun with {name} " in refused(*flags, "--output", output)


def test_rows_of_something_else_are_refused(flags, finished, refused, tmp_path):
    output = shutil.copytree(finished.path, tmp_path / "copy")
    lines = (finished.path / "rows.jsonl").read_text().splitlines(keepends=True)
    for bad in ([lines[0], "{}\n"], ["no json\n"]):
        (output / "rows.jsonl").write_text("".join(bad))
        assert f"line {len(bad)} of " in refused(*flags, "--output", output)


def test_a_folder_of_something_else_is_refused(flags, refused, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "holds other files" in refused(*flags, "--output", tmp_path)
    assert "is a file: name a folder" in refused(*flags, "--output", tmp_path / "thesis.tex")
    assert "is a URL: name a local path" in refused(*flags, "--output", "gs://bucket/out")


# Other runs.


@pytest.mark.slow
def test_two_tasks_over_rejection(target, prompts, tmp_path):
    """The draft's true distribution, and a task scored by likelihood."""
    stories = tmp_path / "stories.txt"
    stories.write_text("\n<|endoftext|>\n".join(["a b " * 30] * 3))
    output = tmp_path / "output"
    code = call(
        *("--target", target, "--draft", f"model:{target}", "--num-draft-tokens", 2, "--base", "rejection"),
        *("--task", f"stories={stories}", "--task", f"jsonl={prompts}", "--problems", 3, "--batch-size", 3),
        *("--temperatures", 1, "--max-new-tokens", 12, "--controls", "all"),
        *("--output", output),
    )
    assert code == 0
    made = read_folder(output)
    assert [t["task"] for t in made.summary["tables"]] == ["stories", "jsonl"]
    for part in made.summary["tables"]:
        arms = {a["arm"]: a for a in part["arms"]}
        assert list(arms)[1:3] == ["rejection", "mars over rejection theta=0.9"]
        assert arms["rejection"]["tau"] > 2  # of 3: it drafts for itself, and q is p
    assert {len(row["score"]) for row in made.rows if row["task"] == "stories"} == {2}
    assert {len(row["score"]) for row in made.rows if row["task"] == "jsonl"} == {1}
    stories = made.summary["tables"][0]["arms"]
    # A tiny random model: nearly uniform over its vocabulary, and what the rule lets through is no less likely.
    assert all(0 < arm["score"] < 1 for arm in stories) and stories[0]["recovered"] == 1.0


# Bad input: one sentence, before any weights load.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--thetas", "2"], "--thetas has 2: expected a number above 0 and at most 1 for the margin ratio"),
        (["--thetas", "x"], "--thetas has x: expected a number above 0"),
        (["--thetas", "inf"], "--thetas has inf, which is the strict rule"),
        (["--thetas", "0.9", "0.90"], "--thetas has a value twice"),
        (["--temperatures", "1", "1.0"], "--temperatures has a value twice"),
        (["--temperatures", "-1"], "--temperatures has -1: expected a finite number"),
        (["--problems", "0"], "--problems has 0: expected a whole number"),
        (["--batch-size", "0"], "--batch-size is 0: expected"),
        (["--draft", "none"], "--draft is none: expected ngram"),
        (["--draft", "ngram", "--tree", "2-2"], "--tree does not apply to --draft ngram"),
        (["--tree", "2-2", "--num-draft-tokens", "2"], "--num-draft-tokens does not apply with --tree"),
        (
            ["--tree", "2-2", "--base", "rejection", "--block"],
            "--tree does not apply to the rule mars over rejection",
        ),
        (["--theta", "0.9"], "unrecognized arguments: --theta"),
        (["--rule-option", "theta=0.9"], "--rule-option theta does not apply here: give --thetas"),
        (["--verify", "exact", "--thetas", "0.9"], "--thetas does not apply to the rule exact"),
        (["--verify", "simulated"], "--verify simulated does not apply here, since its text means nothing"),
        (["--verify", "gates.py:gate"], "the file of a rule 'gates.py' cannot be read"),
        (["--task", "arithmetic"], "--task names a task twice"),
        (["--task", "chess=x"], "there is no task 'chess'"),
        (["--margin", "width"], "--margin is width: expected one of ratio, gap"),
        (["--chat"], "has no chat template: leave --chat out"),
        (["--surprise"], "unrecognized arguments: --surprise"),
    ],
)
def test_bad_flags(refused, target, tmp_path, argv, message):
    output = tmp_path / "output"
    common = ["--target", target, "--draft", f"model:{target}", "--task", "arithmetic", "--output", output]
    assert message in refused(*common, *argv)
    assert not output.exists()


def test_what_must_be_there(refused, tmp_path, target):
    assert "there is no --output" in refused("--task", "arithmetic")
    assert "there is no --task" in refused("--output", tmp_path)
    assert "--chat does not apply to stories" in refused(
        "--task", "stories=x", "--chat", "--output", tmp_path / "o"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--draft", "eagle:nowhere"], "there is no directory 'nowhere'"),
        (
            ["--draft", "replay:nowhere"],
            "--draft is replay:nowhere, and there is no such file: check the path.",
        ),
        (["--refine", "nowhere"], "--refine is nowhere, and there is no such file: check the path."),
    ],
)
def test_a_path_that_is_not_there_is_refused_before_weights_load(
    refused, tmp_path, monkeypatch, argv, message
):
    monkeypatch.setattr(hub, "load", None)
    given = ["--task", "arithmetic", "--problems", 2, "--output", tmp_path / "o", *argv]
    assert message in refused(*given)
    assert not (tmp_path / "o").exists()


def test_a_recipe_has_a_folder_that_can_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "paper"
    assert f"'{place}' leads through" in refused("--recipe", "embedded", "--output", place.parent)
    assert "is a URL: name a local path" in refused("--recipe", "embedded", "--output", "gs://bucket/out")


def test_a_problem_that_does_not_fit_is_named(refused, target, tmp_path):
    message = refused("--target", target, "--task", "arithmetic", "--output", tmp_path / "output")
    assert "arithmetic, problem " in message and "a context of 64" in message
    assert not (tmp_path / "output").exists()


def test_the_default_is_the_embedded_family():
    args = parse(["--task", "arithmetic", "--output", "o"])
    assert (args.target, args.draft) == ("tiny/target", "model:tiny/draft")
    assert args.temperatures == [0.0, 1.0] and args.thetas is None and args.batch_size == 1
    assert args.controls == "paper"
    [choices] = [action.choices for action in parser()._actions if action.dest == "controls"]
    assert choices == CONTROLS
    assert parse(["--target", "x", "--task", "arithmetic", "--output", "o"]).draft == "ngram"
    with pytest.raises(MarsError, match="a value twice"):
        parse(["--task", "arithmetic", "--output", "o", "--temperatures", "0", "-0"])
    assert parse(["--task", "a", "--output", "o", "--margin", "gap", "--thetas", "2"]).thetas == [2.0]


def test_a_report_has_the_date_and_commit_of_its_last_row():
    """Of rows that are older than commits in them, nobody says that they are of this one."""
    old = {"date": "2026-01-01", "tau": 1.0}
    new = {"date": "2026-01-02T10:00+00:00", "commit": "a", "dirty": False, "tau": 2.0}
    assert report.latest([new, old]) == {"date": new["date"], "commit": "a", "dirty": False}
    assert report.latest([old]) == {"date": "2026-01-01", "commit": None, "dirty": None}
    assert report.latest([]) == {}
