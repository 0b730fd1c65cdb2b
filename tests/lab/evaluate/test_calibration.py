"""Tests of calibration: the bound holds over resamplings, tests stop at a failure, and a file fits only its run."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.command import main as generate
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.lab import calibration
from mars_jax.lab.calibration import FACTORS, choose_threshold, fewest, p_value
from mars_jax.lab.commands import calibrate
from mars_jax.lab.commands.benchmark import main as benchmark
from mars_jax.lab.evaluate import answers
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.theta import read_theta, run_settings
from mars_jax.utils.errors import MarsError
from mars_jax.verify.relaxed import UNLIMITED_RUN
from tests.cli.conftest import write_checkpoint
from tests.helpers import slow_but
from tests.lab.evaluate.conftest import dying_after

RESAMPLINGS = 200


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("kind", ["flips", "regret"])
def test_the_bound_holds_as_often_as_promised_over_resamplings(kind, confidence):
    """Hardest case: a risk that is not monotone, with thresholds just above the bound after easy ones."""
    rng = np.random.default_rng(0)
    thetas, bound = [0.95, 0.9, 0.85, 0.8, 0.7], 0.03
    risks = [0.0, 0.001, 0.0302, 0.029, 0.2]
    if kind == "flips":  # a score is lost or gained, like accuracy
        counts = [(round(20_000 * risk) + 400, 400) for risk in risks]
        signs = [np.repeat([1.0, -1.0, 0.0], [lost, won, 20_000 - won - lost]) for lost, won in counts]
        population = [rng.permutation(losses) for losses in signs]
    else:
        population = [np.clip(rng.exponential(max(r, 1e-9), 20_000), 0, 1) for r in risks]
    truth = dict(zip(thetas, (p.mean() for p in population), strict=True))
    truth[math.inf] = 0.0
    columns = dict(zip(thetas, population, strict=True))
    within_bound = relaxed = 0
    for _ in range(RESAMPLINGS):
        rows = rng.integers(0, 20_000, 400)
        theta, trials = choose_threshold(
            thetas, lambda t, rows=rows: (columns[t][rows], 2.0), bound=bound, confidence=confidence
        )
        within_bound += truth[theta] <= bound
        relaxed += theta <= 0.9
        assert [t.passed for t in trials[:-1]] == [True] * (len(trials) - 1)
    assert within_bound / RESAMPLINGS >= confidence
    # The bound must not hold only because the rule never relaxes.
    assert relaxed / RESAMPLINGS >= (0.9 if kind == "regret" else 0.15)


@pytest.mark.parametrize("share", FACTORS)
@pytest.mark.parametrize("bound", [0.02, 0.005])
def test_so_many_problems_certify_a_loss(bound, share):
    """Each text loses all or nothing, which is the hardest case."""
    rng = np.random.default_rng(0)
    problems = FACTORS[share] * fewest(bound, 0.95)
    draws = [(rng.random(problems) < share * bound).astype(float) for _ in range(400)]
    assert np.mean([p_value(losses, bound, 0.95) <= 0.05 for losses in draws]) >= 0.93


def test_the_p_value_is_that_of_a_bet_written_out():
    """Oracle: the capital from the loop of the paper. Each bet depends only on past losses."""
    rng = np.random.default_rng(1)
    losses, bound, confidence = rng.choice([0.0, 0.0, 0.0, 0.2, -0.1], 300), 0.04, 0.9
    capital, highest, past_losses = 1.0, 1.0, []
    for loss in losses:
        x, r, past = (loss + 1) / 2, (bound + 1) / 2, [(s + 1) / 2 for s in past_losses]
        means = [(0.5 + sum(past[: i + 1])) / (2 + i) for i in range(len(past))]
        variance = (0.25 + sum((a - m) ** 2 for a, m in zip(past, means, strict=True))) / (1 + len(past))
        bet = min(math.sqrt(2 * math.log(1 / (1 - confidence)) / (len(losses) * variance)), 0.75 / (1 - r))
        capital *= 1 - bet * (x - r)
        highest = max(highest, capital)
        past_losses.append(loss)
    assert p_value(losses, bound, confidence) == pytest.approx(1 / highest)


def test_too_few_problems_are_known_beforehand():
    count = fewest(0.05, 0.9)
    assert p_value(np.zeros(count), 0.05, 0.9) <= 0.1 < p_value(np.zeros(count - 1), 0.05, 0.9)


def test_a_loss_that_was_not_certified_says_how_many_problems_it_takes():
    args = SimpleNamespace(setting="theta", risk="regret", bound=0.02, confidence=0.95)
    messages = {}
    for risk in (0.001, 0.004, 0.015):
        trial = {"theta": 0.9, "risk": risk, "p_value": 0.2, "tau": 2.0, "passed": False}
        messages[risk] = calibrate._table({"trials": [trial]}, math.inf, args).splitlines()[-1]
    assert messages[0.001] == "a risk of 0.001 takes about 408 problems"
    assert messages[0.004] == "a risk of 0.004 takes about 816 problems"
    assert messages[0.015].startswith("no theta is certified")


# The command and its file.


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    file = tmp_path_factory.mktemp("calibrate") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the sea {i}"}) + "\n" for i in range(8)))
    return file


def pair_of(target, **changes):
    """Return flags of generate and calibrate for one pair and temperature."""
    flags = {"target": target, "draft": f"model:{target}", "num-draft-tokens": 2, "temperature": 1} | changes
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def call(*argv):
    return calibrate.main([str(a) for a in argv])


@pytest.fixture(scope="module")
def flags(target, jsonl):
    return [
        *pair_of(target),
        *("--task", f"jsonl={jsonl}", "--max-new-tokens", 12, "--batch-size", 4, "--thetas", 0.9, 0.5),
        *("--bound", 0.9, "--confidence", 0.5),
    ]


@pytest.fixture(scope="module")
def theta_file(flags, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate") / "theta.json"
    assert call(*flags, "--output", path) == 0
    assert [p.name for p in path.parent.iterdir()] == ["theta.json"]
    return path


@pytest.mark.parametrize(("groups", "torn"), [(0, 0), (1, 0), (2, 7)])
@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_alike(theta_file, flags, tmp_path, capsys, monkeypatch, groups, torn):
    output = tmp_path / "theta.json"
    with monkeypatch.context() as patch:
        patch.setattr(answers, "_decoded", dying_after(groups))
        assert call(*flags, "--output", output) == 130
    assert not output.exists()
    rows = tmp_path / "theta.json-rows" / "rows.jsonl"
    if torn:
        rows.write_bytes(rows.read_bytes()[:-torn])
    decoded = []

    def counting(*args, run=answers._decoded, **options):
        decoded.append(1)
        return run(*args, **options)

    monkeypatch.setattr(answers, "_decoded", counting)
    capsys.readouterr()
    assert call(*flags, "--output", output) == 0
    resumed, uninterrupted = (json.loads(path.read_text()) for path in (output, theta_file))
    assert resumed.pop("made").keys() == uninterrupted.pop("made").keys()
    assert resumed == uninterrupted
    assert len(decoded) == 3 - groups + bool(torn) and not rows.exists()


@pytest.mark.parametrize("path", ["file/x", "/proc/theta.json"])
def test_a_path_that_takes_no_file_is_refused(tmp_path, capsys, path):
    (tmp_path / "file").touch()
    output = tmp_path / path
    assert call("--target", "nowhere", "--task", "arithmetic", "--output", output) == 2
    error = capsys.readouterr().err
    assert f"'{output.parent}'" in error or f"'{output}' cannot be written" in error


def test_the_shortest_prefix_that_a_judge_lets_pass_is_chosen(flags, target, tmp_path, capsys):
    """All prefixes pass such a weak bound, so the last one is chosen. A strict first token keeps the first letter."""
    index = flags.index("--thetas")
    flags = [*flags[:index], *flags[index + 3 :], "--prefixes", 2, 1, "--theta", 0.5]
    judge, output = tmp_path / "judges.py", tmp_path / "prefix.json"
    judge.write_text("def first(prompt, answer):\n    return 'the sea' in prompt and answer[:1].isalpha()\n")
    assert call(*flags, "--risk", f"{judge}:first", "--output", output) == 0
    assert "prefix 1: judge below 0.9 of the judge's number with confidence 0.5" in capsys.readouterr().out
    report = json.loads(output.read_text())
    assert report["theta"] == 0.5 and report["rule"]["settings"]["exact_prefix"] == 1
    report["promise"].pop("meaning")
    assert report["promise"] == {"risk": "judge", "judge": f"{judge}:first", "bound": 0.9, "confidence": 0.5}
    assert [(t["exact_prefix"], t["risk"]) for t in report["trials"]] == [(2, 0.0), (1, 0.0)]
    args = parse([*pair_of(target), "--theta", str(output), "hello"])
    assert args.rule.settled()["exact_prefix"] == 1


@pytest.mark.parametrize("wrong", [2, -0.1, float("nan"), "good", None])
def test_a_judge_gives_a_number_from_0_to_1(wrong):
    problem = Problem(task="t", id="0", turns=("?",), metric="none")
    with pytest.raises(MarsError, match="for problem 0: expected a number from 0 to 1"):
        calibration.judged(lambda prompt, answer: wrong, problem, "yes")


def test_generate_takes_the_file_and_its_rule(theta_file, target):
    elsewhere = pair_of(f"elsewhere/{target.name}", draft=f"model:{target}")
    args = parse([*elsewhere, "--theta", str(theta_file), "hello"])
    settings = {"theta": 0.5, "margin": "ratio", "base": "exact", "exact_prefix": 0}
    assert args.rule.spec == "mars"
    assert args.rule.settled() == settings | {"max_relaxed_run": UNLIMITED_RUN}


@pytest.fixture
def edited(theta_file, tmp_path):
    """Return a function that writes a changed copy of the file."""

    def write(change):
        data = json.loads(theta_file.read_text())
        change(data)
        (tmp_path / "theta.json").write_text(json.dumps(data))
        return tmp_path / "theta.json"

    return write


@pytest.mark.parametrize("replaced", slow_but(["target", "draft", None], "target", "draft"))
def test_the_file_holds_for_its_weights_wherever_they_are(theta_file, target, tmp_path, capsys, replaced):
    """Weights are identified by content: other weights are refused even in a folder of the same name."""
    folders = {}
    for name in ("target", "draft"):
        folders[name] = tmp_path / name / target.name
        shutil.copytree(target, folders[name])
        if name == replaced:
            with (folders[name] / "model.safetensors").open("r+b") as file:
                file.seek(-4, 2)
                file.write(b"\0\0\0\x3f")
    pair = pair_of(folders["target"], draft=f"model:{folders['draft']}")
    code = generate([*pair, "--max-new-tokens", "1", "--theta", str(theta_file), "the sea"])
    line = f"error: '{theta_file}' was calibrated with other weights of the {replaced}, or in another --dtype"
    assert code == (2 if replaced else 0) and capsys.readouterr().err.startswith(line if replaced else "")


def test_the_benchmark_refuses_the_file_for_other_weights_too(edited, flags, target, tmp_path, capsys):
    write_checkpoint(tmp_path / target.name, seed=3)
    file = edited(lambda data: data["settings"].update(temperature=0.0))
    task = flags[flags.index("--task") : flags.index("--thetas")]
    argv = [*pair_of(tmp_path / target.name, draft=f"model:{target}")[:-2], *task, "--thetas", file]
    assert benchmark([*map(str, argv), "--output", str(tmp_path / "study")]) == 2
    assert "was calibrated with other weights of the target" in capsys.readouterr().err


def test_a_setting_that_is_newer_than_a_file_had_its_default(edited, target):
    file = edited(lambda data: data["rule"]["settings"].pop("exact_prefix"))
    flags = [*pair_of(target), "--theta", str(file), "--verify", "mars", "hello"]
    assert parse(flags).rule.settled()["exact_prefix"] == 0
    with pytest.raises(MarsError, match="was calibrated for the exact prefix 0, and this run has 2"):
        parse([*flags, "--exact-prefix", "2"])


def test_a_file_for_somebodys_own_rule_runs_nothing_until_it_is_named(edited, target, tmp_path):
    marker, rule_file = tmp_path / "ran", tmp_path / "gates.py"
    rule_file.write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nfrom mars_jax import verify\n"
        "def gate(theta: float = 1.0, most: int = 3):\n    return verify.exact()\n"
    )
    file = edited(lambda data: data.update(rule={"verify": f"{rule_file}:gate", "settings": {"most": 2}}))
    flags = [*pair_of(target), "--theta", str(file), "hello"]
    with pytest.raises(MarsError, match="name it as --verify too, since that runs its code"):
        parse(flags)
    assert not marker.exists()
    flags += ["--verify", f"{rule_file}:gate"]
    assert dict(parse(flags).rule.settings) == {"most": 2, "theta": 0.5}
    with pytest.raises(MarsError, match="calibrated for the most 2, and this run has 3"):
        parse([*flags, "--rule-option", "most=3"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--target other", "calibrated for the target"),
        ("--draft ngram", "calibrated for the draft"),
        ("--num-draft-tokens 3", "calibrated for the num draft tokens 2, and this run has 3"),
        ("--margin gap", "calibrated for the margin ratio, and this run has gap"),
        ("--verify learned:head", "calibrated for the rule mars, and this run has learned:head"),
    ],
)
def test_a_threshold_for_something_else_is_refused(theta_file, target, change, message):
    rows = [PromptRow(where="", prompt="hello")]
    with pytest.raises(MarsError, match=message):
        check_flags(parse([*pair_of(target), "--theta", str(theta_file), *change.split(), "hello"]), rows)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "mars-jax theta 3"}', '{"format": "mars-jax theta 1", "theta": 0.9}']
)
def test_a_file_that_is_none_is_refused(tmp_path, text):
    file = tmp_path / "theta.json"
    file.write_text(text)
    with pytest.raises(MarsError, match="holds no threshold"):
        read_theta(str(file))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bound 0.01", "8 problems cannot certify a bound of 0.01 with confidence 0.95"),
        ("--bound 2", "--bound is 2: expected a number between 0 and 1"),
        ("--risk accuracy --bound 0.9", "--risk accuracy needs a score of every answer"),
        ("--risk harm", "--risk is harm: expected regret, accuracy, or a judge as FILE.py:NAME"),
        ("--risk nowhere.py:safe", "the file of a judge 'nowhere.py' cannot be read"),
        (
            "--risk math:nothing",
            "the judge is math:nothing: nothing is not in it; name a function",
        ),
        ("--thetas 0.5 0.9", "--thetas are not in order: give finite numbers from strict to loose, falling"),
        ("--thetas 1.5", "--thetas is 1.5: expected a number above 0 and at most 1 for the margin ratio"),
        ("--theta 0.8", "--theta does not apply here: give --thetas"),
        ("--prefixes 1 2", "--prefixes are not in order"),
        ("--prefixes 2 --thetas 0.9", "--thetas does not apply with --prefixes"),
        ("--prefixes 2 --exact-prefix 3", "--exact-prefix does not apply with --prefixes"),
        ("--prefixes 2 --verify exact", "--verify exact has no theta to calibrate"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_anything_loads(jsonl, tmp_path, capsys, flags, message):
    argv = ["--target", "nowhere", "--task", f"jsonl={jsonl}", *flags.split()]
    assert call(*argv, "--output", tmp_path / "theta.json") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "theta.json").exists()


@pytest.mark.parametrize(("tree", "made"), [("dynamic:3-4-9", {"dynamic": [3, 4, 9]}), ("3-4-9", [3, 4, 9])])
def test_trees_are_told_apart(tree, made):
    assert run_settings(parse(["--tree", tree, "hello"]))["tree"] == made
