"""Error cascades: branches are what plain decoding gives, and the curves are those of texts made by hand."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters
from mars_jax.core.errors import MarsError
from mars_jax.lab.commands.compounding import main
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.studies.branch_curves import aligned, curves, interval, relapse
from mars_jax.lab.studies.branch_report import findings, summarize
from mars_jax.lab.studies.branches import Decoded, Event, study
from mars_jax.lab.studies.refusals import low_nodes
from mars_jax.serve import likelihood, session
from mars_jax.specs import RuleChoice
from tests.helpers import noisy_copy

THETA, NEW, HORIZON = 0.6, 24, 8


@pytest.fixture(scope="module")
def near(target, tmp_path_factory):
    return noisy_copy(target, tmp_path_factory.mktemp("cascades") / "near")


@pytest.fixture(scope="module")
def pair(target, near):
    loaded = mj.load(str(target))
    return loaded, drafters.load(f"model:{near}", loaded, num_draft_tokens=2)


@pytest.fixture(scope="module")
def studied(pair):
    words = ("the sea", "a story", "of the sun", "and the", "sun", "the story")
    problems = [
        Problem(task="t", id=str(i), turns=(w,), metric="rouge_l", references=("the sea",))
        for i, w in enumerate(words)
    ]
    pytest.importorskip("rouge_score")
    return study(
        *pair,
        problems,
        rule=RuleChoice("mars", {"theta": THETA}),
        max_new_tokens=NEW,
        horizon=HORIZON,
        batch_size=4,
    )


def dateless(folder):
    """The files of a folder by name, without the minute of the report."""
    return {
        path.name: re.sub(rb'"date": "[^"]*"', b"", path.read_bytes())
        if path.suffix == ".json"
        else path.read_bytes()
        for path in folder.iterdir()
    }


@pytest.mark.slow
def test_branches_are_what_the_target_alone_says_there(pair, studied):
    target, _ = pair
    texts, events = studied
    assert {e.control for e in events} == {False, True}
    assert any(sum(t.relaxed) for t in texts)
    for event in events[:6]:
        text = texts[event.problem]
        before = [*text.prompt, *text.tokens[: event.place]]
        left = NEW - event.place
        plain = mj.generate(target, "none", [before], max_new_tokens=left).tokens[0]
        assert list(event.strict) == plain
        assert event.ours[0] != event.strict[0]
        assert event.control or (event.ours[0] == text.tokens[event.place] and text.relaxed[event.place])
        behind = []
        if event.ours[0] not in target.stop_tokens and left > 1:
            behind = mj.generate(target, "none", [[*before, event.ours[0]]], max_new_tokens=left - 1).tokens[
                0
            ]
        assert list(event.ours[1:]) == behind
        assert len(event.our_log_p) == len(event.ours) and len(event.strict_log_p) == len(event.strict)
        # The target never prefers the token that was put in its place.
        assert event.our_log_p[0] <= event.strict_log_p[0]


def test_a_rule_is_asked_where_it_is_indifferent(pair):
    """For mars it is where its margin is low, by the logits of the likelihoods."""
    target, _ = pair
    texts = [(1, 20, 30, 40, 50, 60), (2, 3), tuple(range(10, 50))]
    for margin, theta in (("ratio", 0.9), ("gap", 0.2)):
        found = low_nodes(target, mj.verify.load("mars", margin=margin, theta=theta), texts)
        for low, text, s in zip(found, texts, likelihood.score(target, texts), strict=True):
            assert low.shape == (len(text) - 1,)
            z1, z2 = jnp.asarray(s.z1), jnp.asarray(s.z2)
            assert low.tolist() == mj.verify.MARGINS[margin](z1, z2, jnp.full(len(low), theta)).tolist()
    with pytest.raises(MarsError, match="the rule exact does not say at which nodes"):
        low_nodes(target, mj.verify.load("exact"), texts)


def event(problem, ours, strict, control=False, our_score=None, strict_score=None, surprise=0.5):
    return Event(
        problem, control, 0, len(ours) - 1, tuple(ours), tuple(strict),
        tuple(-1.0 - surprise * i for i in range(len(ours))), (-1.0,) * len(strict), our_score, strict_score,
    )  # fmt: skip


def test_curves_of_texts_made_by_hand():
    shifted = event(0, [9, 5, 1, 2, 3], [0, 1, 2, 3, 4], our_score=0.0, strict_score=1.0)
    same = event(1, [9, 1, 2, 3, 4], [0, 1, 2, 3, 4], our_score=1.0, strict_score=1.0)
    found = curves([shifted, same], 6)
    assert found["same_place"]["mean"] == [0.5, 0.5, 0.5, 0.5, None, None]
    assert found["same_order"]["mean"] == [0.5, 1.0, 1.0, 1.0, None, None]
    assert found["surprise"]["mean"][:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found["score"]["mean"] == [0.5] and found["score"]["changed"] == 0.5


def test_alignment_finds_a_text_that_is_only_moved():
    assert aligned([1, 2, 3, 4, 5], [7, 7, 2, 3, 9, 5]).tolist() == [False, False, True, True, False, True]


def test_findings_say_whether_surprise_grows():
    texts = [Decoded((1,), (2,) * 13, (True, *[False] * 12))] * 8
    verdicts = []
    for slope in (0.3, 0.0):
        events = [event(i, [9] * 13, [0, *[9] * 12], surprise=slope) for i in range(8)]
        found = summarize(texts, events, horizon=12)
        verdicts.append(found["findings"][0])
        assert findings(found)[0] == verdicts[-1]
    assert verdicts[0].startswith("Errors compound: ") and verdicts[1].startswith(
        "No sign that errors compound: "
    )


def test_relapse_is_one_where_relaxed_tokens_do_not_know_each_other():
    rng = np.random.default_rng(0)
    flags = rng.random((1000, 100)) < 0.2
    texts = [Decoded((1,), (2,) * 100, tuple(row)) for row in flags.tolist()]
    found = relapse(texts, 3)
    assert found["share"] == pytest.approx(0.2, abs=0.02)
    assert found["mean"] == pytest.approx([1.0] * 3, abs=0.05)
    assert all(high - low < 0.15 for low, high in zip(found["low"], found["high"], strict=True))
    paired = [Decoded((1,), (2,) * 100, tuple((np.arange(100) % 10 < 2).tolist()))] * 5
    assert relapse(paired, 3)["mean"][0] == pytest.approx(10 / 20 / 0.2)


def test_intervals_resample_problems_and_not_events():
    """Ten copies of an event are one problem's: they do not make the interval narrower."""
    values, groups = np.asarray([[0.0], [1.0]] * 10), np.asarray([0, 1] * 10)
    found = interval(values, groups)
    assert (found["mean"], found["low"], found["high"]) == ([0.5], [0.0], [1.0])


@pytest.mark.slow
def test_the_command_writes_its_report_and_resumes(target, near, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("the sea", "a story", "of the sun"))
    )
    flags = ["--target", target, "--draft", f"model:{near}", "--num-draft-tokens", 2, "--theta", THETA]
    flags += ["--task", f"jsonl={prompts}", "--max-new-tokens", NEW, "--horizon", HORIZON, "--batch-size", 4]
    assert main([str(x) for x in (*flags, "--output", tmp_path / "out")]) == 0
    shown, said = capsys.readouterr()
    assert shown == (tmp_path / "out" / "compounding.md").read_text()
    for what in ("texts", "branches"):
        assert re.search(rf"^{what}, [\d,]+ tokens/s, tau \d\.\d\d: (\d+) of \1 of jsonl$", said, re.M), said
    assert "compound" in shown or "Errors fade" in shown
    summary = json.loads((tmp_path / "out" / "compounding.json").read_text())
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    relaxed = [e for e in events if not e["control"]]
    assert summary["tasks"]["jsonl"]["relaxed"]["events"] == len(relaxed) > 0
    assert all(len(e["ours"]) <= HORIZON for e in events)
    assert (tmp_path / "out" / "compounding.png").read_bytes()[:4] == b"\x89PNG"
    # Run again it decodes nothing, with other flags it does not run.
    summary["date"] = date = f"{summary['date'][:10]}T00:00+00:00"  # pictures show the day
    (tmp_path / "out" / "compounding.json").write_text(json.dumps(summary, indent=1) + "\n")
    before = dateless(tmp_path / "out")
    with monkeypatch.context() as patch:
        for name in ("_run", "_events"):
            patch.setattr(session.Session, name, lambda *args, **options: pytest.fail("decoded"))
        assert main([str(x) for x in (*flags, "--output", tmp_path / "out")]) == 0
    assert capsys.readouterr().out == shown
    assert dateless(tmp_path / "out") == before
    assert json.loads((tmp_path / "out" / "compounding.json").read_text())["date"] == date
    assert main([str(x) for x in (*flags, "--seed", 3, "--output", tmp_path / "out")]) == 2
    assert "was begun with seed 0, not 3" in capsys.readouterr().err
    # Killed in the middle, with a torn row, it goes on.
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert rows.count(b"\n") > 5
    for keep in (0, len(rows) // 3, len(rows) - 9):
        for name in ("compounding.json", "compounding.md", "compounding.png", "events.jsonl"):
            (tmp_path / "out" / name).unlink()
        (tmp_path / "out" / "rows.jsonl").write_bytes(rows[:keep])
        assert main([str(x) for x in (*flags, "--output", tmp_path / "out")]) == 0
        assert dateless(tmp_path / "out") == before


def test_a_folder_that_cannot_be_written_is_known_at_the_start(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "out", Path("/proc/out")):
        assert main(["--target", "nowhere", "--task", "arithmetic", "--output", str(place)]) == 2
        assert f"--output '{place}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--theta", "inf"], "--theta is inf, at which nothing is relaxed"),
        (["--base", "rejection"], "--verify mars over rejection does not apply at temperature 0"),
        (["--verify", "exact"], "--verify exact relaxes nothing, so there is nothing to follow"),
        (["--horizon", "0"], "--horizon has 0: expected a whole number of at least 1"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, capsys, argv, message):
    assert main(["--task", "arithmetic", "--output", str(tmp_path / "out"), *argv]) == 2
    assert message in capsys.readouterr().err
