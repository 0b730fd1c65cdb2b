"""User-defined rules from a file, in generate, benchmark and calibrate."""

import json

import pytest

from mars_jax.lab.commands import benchmark, calibrate
from tests.cli.conftest import rows_of
from tests.helpers import noisy_copy, slow_but

ENTROPY_GATE = '''
"""Relaxes where the target's entropy is high."""

import flax.struct
import jax.numpy as jnp

from mars_jax import contrib, verify


@flax.struct.dataclass
class EntropyGate(verify.Relaxed):
    entropy: jnp.ndarray  # f32[] or [B]; nats

    def low(self, evidence):
        return verify.entropy(evidence.logits) > self.entropy[:, None]


def entropy_gate(entropy: float = 1.5):
    """Also keeps the runner-up where the target's entropy is high."""
    return EntropyGate(base=verify.exact(), entropy=jnp.float32(entropy))


def thresholded(theta: float = 1.5):
    return EntropyGate(base=verify.exact(), entropy=jnp.float32(theta))


def loose_mars(theta: float = 0.5):
    return verify.mars(theta=theta)


mars = loose_mars
'''
NEVER, ALWAYS = 100.0, 0.0
"""Thresholds in nats: no entropy is above NEVER, and every entropy is above ALWAYS."""


@pytest.fixture
def gates(tmp_path):
    file = tmp_path / "gates.py"
    file.write_text(ENTROPY_GATE)
    return str(file)


@pytest.fixture(scope="module")
def noisy(target, tmp_path_factory):
    return noisy_copy(target, tmp_path_factory.mktemp("own") / "near")


@pytest.fixture
def pair(target, noisy):
    return ["--target", target, "--draft", f"model:{noisy}", "--num-draft-tokens", "2"]


def rows(outcome):
    assert outcome.code == 0, outcome.err
    return rows_of(outcome.out)


PROMPTS = ["the sea", "a story of", "the sun"]


def test_a_file_of_ones_own_decodes(run, pair, gates):
    flags = [*pair, "--ignore-eos", "--max-new-tokens", "24", "--json", *PROMPTS]
    gate = ["--verify", f"{gates}:entropy_gate"]
    exact = rows(run(*flags, "--verify", "exact"))
    never = rows(run(*flags, *gate, "--rule-option", f"entropy={NEVER}"))
    always = rows(run(*flags, *gate, "--rule-option", f"entropy={ALWAYS}"))
    assert [row["tokens"] for row in never] == [row["tokens"] for row in exact]
    assert sum(row["accepted_relaxed"] for row in never) == 0 < sum(row["accepted_relaxed"] for row in always)
    assert sum(row["steps"] for row in always) < sum(row["steps"] for row in exact)


FLAGS = ["--ignore-eos", "--max-new-tokens", "24", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["entropy_gate", "loose_mars", "mars"])
def test_compare_shows_it_next_to_mars(run, pair, gates, rule):
    argv = [*pair, "--max-new-tokens", "4", "--compare", "--json", "the sea"]
    [comparison] = rows(run(*argv, "--verify", f"{gates}:{rule}"))
    name = f"{gates}:mars" if rule == "mars" else rule
    assert [row["rule"] for row in comparison["rules"]] == ["autoregressive", "exact", name, "mars"]


@pytest.mark.slow
def test_rows_choose_the_numbers_of_a_rule_of_the_table(run, pair, tmp_path):
    file = tmp_path / "p.jsonl"
    lines = [{"theta": 0.5}, {"max_relaxed_run": 0}, {"theta": float("inf")}, {}, {"exact_prefix": 24}]
    file.write_text("".join(json.dumps({"prompt": "a story of"} | line) + "\n" for line in lines))
    mixed = rows(run(*pair, *FLAGS, "--theta", "0.4", "--prompts-file", file))
    flags = [["--theta", "0.5"], ["--verify", "exact"], ["--verify", "exact"], ["--theta", "0.4"]]
    for row, flag in zip(mixed, [*flags, ["--theta", "0.4", "--exact-prefix", "24"]], strict=True):
        [expected] = rows(run(*pair, *FLAGS, *flag, "a story of"))
        assert row["tokens"] == expected["tokens"]
    assert mixed[0]["accepted_relaxed"] > 0 == mixed[1]["accepted_relaxed"] == mixed[4]["accepted_relaxed"]
    assert mixed[4]["tokens"] != mixed[3]["tokens"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rule-option entropy=high", "--rule-option entropy is high: expected a number"),
        ("--rule-option theta=1", "--rule-option theta does not apply to the rule entropy_gate, which has"),
        ("--theta 1", "--theta does not apply to the rule entropy_gate, which has entropy: leave it out"),
    ],
)
def test_what_it_does_not_have_is_refused(refused, gates, flags, message):
    argv = ["--target", "nowhere", "--verify", f"{gates}:entropy_gate", *flags.split(), "hello"]
    assert refused(*argv).startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"entropy": "high"}, "entropy is 'high': expected a number"),
        ({"theta": 1}, "theta does not apply to the rule entropy_gate, which has entropy"),
        ({"entropi": 1}, "unknown key 'entropi' (did you mean entropy?): the keys are prompt, messages, "),
    ],
)
def test_a_row_of_the_wrong_kind_is_named(refused, gates, tmp_path, row, message):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "a"} | row) + "\n")
    argv = ["--target", "nowhere", "--verify", f"{gates}:entropy_gate", "--prompts-file", file]
    assert f"p.jsonl, line 1: {message}" in refused(*argv)


@pytest.mark.slow
def test_the_benchmark_measures_it_with_the_same_controls(pair, gates, tmp_path):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    flags = [*pair, "--task", f"jsonl={prompts}", "--max-new-tokens", 12, "--batch-size", 3]
    flags += ["--temperatures", 0, "--controls", "all", "--output", tmp_path / "out"]
    flags += ["--verify", f"{gates}:entropy_gate", "--rule-option"]

    def measure(option):
        return benchmark.main([str(x) for x in (*flags, option)])

    assert measure(f"entropy={ALWAYS}") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["settings"]["rule"] == {"verify": f"{gates}:entropy_gate", "settings": {"entropy": ALWAYS}}
    [table] = summary["tables"]
    arms = {arm["arm"]: arm for arm in table["arms"]}
    assert list(arms) == ["autoregressive", "exact", "entropy_gate entropy=0"]
    gate = arms["entropy_gate entropy=0"]
    assert gate["relaxed_share"] > 0 and gate["tau"] > arms["exact"]["tau"]
    assert f"rule {gates}:entropy_gate (entropy 0" in (tmp_path / "out" / "table.md").read_text()
    # The same command may continue in its folder; a different rule setting is refused.
    assert measure(f"entropy={ALWAYS}") == 0 and measure("entropy=1") == 2


@pytest.mark.slow
def test_its_theta_can_be_calibrated(run, pair, gates, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the sea {i}"}) + "\n" for i in range(8)))
    flags = [*pair, "--task", f"jsonl={prompts}", "--max-new-tokens", 12, "--batch-size", 4, "--bound", 0.9]
    flags += ["--confidence", 0.5, "--output", tmp_path / "theta.json", "--verify"]

    def code(*words):
        return calibrate.main([str(x) for x in (*flags, *words)])

    spec = f"{gates}:thresholded"
    assert code(spec) == 2 and "has no thresholds of its own: give --thetas" in capsys.readouterr().err
    assert code(f"{gates}:entropy_gate") == 2
    assert "--verify entropy_gate has no theta to calibrate" in capsys.readouterr().err
    assert code(spec, "--thetas", NEVER, ALWAYS) == 0
    calibration = json.loads((tmp_path / "theta.json").read_text())
    assert calibration["rule"] == {"verify": spec, "settings": {}} and calibration["theta"] == ALWAYS
    flags = [*pair, "--max-new-tokens", 8, "--json", "--verify", spec, "the sea"]
    [row] = rows(run(*flags, "--theta", tmp_path / "theta.json"))
    [same] = rows(run(*flags, "--rule-option", "theta=0"))
    assert row["tokens"] == same["tokens"]


FAILING = """
import dataclasses
import sys

import flax.struct
import jax.numpy as jnp
import numpy as np

from mars_jax import verify


@flax.struct.dataclass(frozen=True)
class Gate(verify.{base}):
    theta: object = np.float32(1)
    {budget}
    def {method}:
        {statement}


def gate():
    return {rule}


def exact(self, evidence):
    verdict, _ = verify.exact()(evidence)
    return dataclasses.replace(verdict, next_token=verdict.next_token.astype("float32")), self
"""
BUDGET = """
    def relaxable(self, evidence):
        return evidence.tree.tokens > 0
    def cost(self, evidence):
        return jnp.ones(evidence.tree.tokens.shape), self.theta
"""
LOW, COST, CALL = "low(self, evidence)", "cost(self, evidence)", "__call__(self, evidence)"
SPEND, TARGET = "spend(self, left)", "target(self, log_p, log_q, evidence)"
SHAPES = "dot_general requires contracting dimensions to have the same shape, got (3,) and (4,)"
REPLACED = "a rule whose theta is float32[]; expected a rule whose theta is float32[1]"
VERDICT = "a verdict whose next_token is float32[1]; expected a verdict whose next_token is int32[1]"
ANOTHER = "an object of type Exact; expected an object of type Gate with the same structure"
FAILURES = [
    (LOW, "raise ValueError('no\\nentropy')", "raised ValueError (no); expected low to return bool[B, N]"),
    (
        LOW,
        "return jnp.ones(3) @ jnp.ones(4)",
        f"raised TypeError ({SHAPES}); expected low to return bool[B, N]",
    ),
    (LOW, "return verify.entropy(evidence.logits)", "returned float32[1, 3]; expected bool[1, 3]"),
    (COST, "return self.theta, self.theta", "returned a cost float32[1]; expected a cost float32[1, 3]"),
    (COST, "return self.theta", "returned float32[1]; expected (f32[B, N], f32[B]) or None"),
    (SPEND, "return dataclasses.replace(self, theta=left[0])", f"returned {REPLACED}"),
    (TARGET, "return log_p[:, 0]", "returned float32[1, 269]; expected float32[1, 3, 269]"),
    (
        CALL,
        "return verify.exact()(evidence)[0]",
        "returned an object of type Verdict; expected (Verdict, rule)",
    ),
    (CALL, "return exact(self, evidence)", f"returned {VERDICT}"),
    (CALL, "return verify.exact()(evidence)", f"returned {ANOTHER}"),
]
"""For each rule: a method, its only statement, and the problem."""
EXITS = ("sys.exit('stop')", "sys.exit", "gate raised SystemExit (stop); expected gate to return a rule")


def line_of(source, text):
    """Return the number of the last line that contains the text."""
    return max(n for n, line in enumerate(source.splitlines(), start=1) if text in line)


@pytest.mark.parametrize(("method", "statement", "problem"), slow_but(FAILURES, FAILURES[0], FAILURES[2]))
def test_a_method_that_fails_gets_one_sentence(method, statement, problem, refused, pair, tmp_path):
    base, sampled = ("Retargeted", ["--temperature", "1"]) if method == TARGET else ("Relaxed", [])
    budget = BUDGET if method in (COST, SPEND) else ""
    file = tmp_path / "gate.py"
    source = FAILING.format(base=base, budget=budget, method=method, statement=statement, rule="Gate()")
    file.write_text(source)
    line = line_of(source, statement if problem.startswith("raised") else f"def {method}")
    message = refused(*pair, *sampled, "--max-new-tokens", "4", "--verify", f"{file}:gate", "the sea")
    name = method.partition("(")[0]
    assert message == f"error: the rule Gate fails in {file}, line {line}: {name} {problem}.\n"


@pytest.mark.parametrize(
    ("rule", "marker", "problem"),
    slow_but([EXITS, ("3", "def gate", "gate returned 3; expected a rule")], EXITS),
)
def test_a_constructor_that_fails_gets_one_sentence(rule, marker, problem, refused, pair, tmp_path):
    file = tmp_path / "gate.py"
    file.write_text(FAILING.format(base="Relaxed", budget="", method=LOW, statement="pass", rule=rule))
    message = refused(*pair, "--verify", f"{file}:gate", "the sea")
    line = line_of(file.read_text(), marker)
    assert message.startswith(f"error: the rule is {file}:gate: {file}, line {line}: {problem}")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import sys\nsys.exit(1) # here", "<module> raised SystemExit (1)"),
        ("def gate(: # here", "SyntaxError (invalid syntax)"),
    ],
)
def test_a_file_that_fails_gets_one_sentence(source, problem, refused, tmp_path):
    file = tmp_path / "gate.py"
    file.write_text(source)
    expected = (
        f"error: the file of a rule '{file}' does not run: {file}, line {line_of(source, 'here')}: {problem}; "
        "expected a file that defines a function that makes a rule.\n"
    )
    assert refused("--target", "nowhere", "--verify", f"{file}:gate", "the sea") == expected
