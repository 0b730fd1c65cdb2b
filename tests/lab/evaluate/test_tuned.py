"""Tests of tuned arms: the report follows from the rows, and the rows equal direct decodes."""

import json

import pytest

import mars_jax as mj
from mars_jax.lab.commands.benchmark import parse
from mars_jax.lab.evaluate import answers
from mars_jax.lab.evaluate.benchmark import tuned
from mars_jax.utils.errors import MarsError
from tests.lab.evaluate.conftest import PROMPTS, call, dying_after

LENGTHS = (1, 3)


@pytest.fixture(scope="module")
def flags(target, prompts):
    """Return the flags except the output. The target drafts for itself."""
    pair = ("--target", target, "--draft", f"model:{target}")
    return [*pair, "--tune", *LENGTHS, "--task", f"jsonl={prompts}", "--max-new-tokens", 6]


def run(flags, output, *extra_flags):
    assert call(*flags, *extra_flags, "--output", output) == 0
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    return json.loads((output / "tuned.json").read_text()), rows


ARMS = {0.0: ["exact", "mars theta=0.9"]}
ARMS[0.7] = ["exact", "rejection", "block", "mars theta=0.9", "mars over rejection theta=0.9"]


@pytest.fixture(scope="module", params=[0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def finished(flags, request, tmp_path_factory):
    """Return the temperature, the report and the rows of one run that chooses lengths by a cost model."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    return request.param, *run(flags, out, "--draft-cost", "0.3", "--temperatures", str(request.param))


def test_what_is_told_follows_from_the_rows(finished):
    temperature, report, rows = finished
    [table] = report["tables"]
    num_choosing = tuned.math.ceil(len(PROMPTS) / tuned.SHARE)
    assert (table["chosen_on"], table["problems"]) == (num_choosing, len(PROMPTS) - num_choosing)
    names = [arm["arm"] for arm in table["arms"]]
    assert names == ARMS[temperature]

    def tau(arm, length, choosing):
        used = [r for r in rows if (r["arm"], r["length"]) == (arm, length) and (r["id"] == "0") == choosing]
        assert len(used) == (num_choosing if choosing else len(PROMPTS) - num_choosing)
        return sum(r["emitted"] for r in used) / sum(r["steps"] for r in used)

    rates = {}
    for arm in table["arms"]:
        tried = {n: tau(arm["arm"], n, True) for n in LENGTHS}
        assert arm["tau_by_length"] == {str(n): value for n, value in tried.items()}
        assert arm["length"] == max(tried, key=lambda n: tried[n] / (1 + 0.3 * n))
        assert arm["tau"] == tau(arm["arm"], arm["length"], False)
        rates[arm["arm"]] = arm["tau"] / (1 + 0.3 * arm["length"])
    # The draft is the target, so it is fully accepted.
    assert dict(zip(names, table["arms"], strict=True))[names[-1]]["tau_by_length"]["3"] > 2
    # Because q = p, rejection accepts every sampled draft, while `exact` does not.
    assert table["best_lossless"] in (("rejection", "block") if temperature else ("exact",))
    for arm in table["arms"]:
        value, low, high = arm["over_lossless"]
        assert value == pytest.approx(rates[arm["arm"]] / rates[table["best_lossless"]])
        assert low <= value <= high
    scored = [arm["score"] - table["alone"]["score"] for arm in table["arms"]]
    assert [arm["score_change"] for arm in table["arms"]] == pytest.approx(scored)
    assert f"The best lossless arm is {table['best_lossless']}." in tuned.tuned_markdown(report)


def test_rows_are_those_of_a_decode_at_that_length(finished, target):
    temperature, _, rows = finished
    model = mj.load(str(target))
    sampled = "rejection" in ARMS[temperature]
    name, rule = ("rejection", mj.verify.rejection()) if sampled else ("mars theta=0.9", mj.verify.mars())
    drafter = mj.drafters.load(f"model:{target}", model, num_draft_tokens=3, sample=sampled)
    options = {"temperature": temperature, "seed": [0], "max_new_tokens": 6}
    decoded = mj.generate(model, drafter, PROMPTS[:1], verify=rule, **options)
    [row] = [r for r in rows if (r["arm"], r["length"], r["id"]) == (name, 3, "0")]
    assert row["tokens"] == [list(decoded.tokens[0])]


@pytest.mark.slow
def test_it_goes_on_after_a_kill(flags, tmp_path):
    """Existing rows are kept, and the other rows equal those of an uninterrupted run."""
    extra_flags = ["--draft-cost", "0.3", "--temperatures", "0"]
    _, expected = run(flags, tmp_path / "whole", *extra_flags)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(answers, "_decoded", dying_after(5))
        assert call(*flags, *extra_flags, "--output", tmp_path / "out") == 130
    first_rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert first_rows.count(b"\n") == 5
    _, rows = run(flags, tmp_path / "out", *extra_flags)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes().startswith(first_rows)
    same = ("arm", "length", "id", "tokens", "steps", "score")
    assert [[r[k] for k in same] for r in rows] == [[r[k] for k in same] for r in expected]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-draft-tokens", "3"], "--num-draft-tokens does not apply with --tune"),
        (["--tree", "4-2"], "--tree does not apply with --tune"),
        (["--controls", "all"], "--controls does not apply with --tune"),
        (["0"], "--tune is 0"),
        (["--draft", "medusa:x"], "--tune does not apply to --draft medusa, which has no chains"),
    ],
)
def test_flags_that_do_not_apply_are_refused(flags, message):
    with pytest.raises(MarsError, match=message):
        parse(["--task", "arithmetic", "--output", "x", "--tune", *flags])


def test_a_task_of_one_problem_is_refused(target, prompts, tmp_path, capsys):
    flags = ["--tune", "1", "--target", target, "--draft", f"model:{target}", "--task", f"jsonl={prompts}"]
    assert call(*flags, "--problems", 1, "--output", tmp_path / "out") == 2
    assert "ask for at least 2" in capsys.readouterr().err
