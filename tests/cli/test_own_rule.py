"""User-defined rules from a file, in generate, benchmark and calibrate."""

from __future__ import annotations

import json

import pytest

from mars_jax.lab.commands import benchmark, calibrate
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


def over_rejection(entropy: float = 1.5):
    return EntropyGate(base=verify.rejection(), entropy=jnp.float32(entropy))


def thresholded(theta: float = 1.5):
    return EntropyGate(base=verify.exact(), entropy=jnp.float32(theta))
'''
NEVER, ALWAYS = 100.0, 0.0
"""Thresholds in nats: no entropy is above NEVER, and every entropy is above ALWAYS."""


@pytest.fixture
def gates(tmp_path):
    file = tmp_path / "gates.py"
    file.write_text(ENTROPY_GATE)
    return str(file)


@pytest.fixture(scope="module")
def near(target, tmp_path_factory):
    return noisy_copy(target, tmp_path_factory.mktemp("own") / "near")


@pytest.fixture
def pair(target, near):
    return ["--target", target, "--draft", f"model:{near}", "--num-draft-tokens", "2"]


def rows(outcome):
    assert outcome.code == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


PROMPTS = ["the sea", "a story of", "the sun"]


def test_a_file_of_ones_own_decodes(run, pair, gates):
    flags = [*pair, "--ignore-eos", "--max-new-tokens", "24", "--json", *PROMPTS]
    own = ["--verify", f"{gates}:entropy_gate"]
    exact = rows(run(*flags, "--verify", "exact"))
    never = rows(run(*flags, *own, "--rule-option", f"entropy={NEVER}"))
    always = rows(run(*flags, *own, "--rule-option", f"entropy={ALWAYS}"))
    assert [row["tokens"] for row in never] == [row["tokens"] for row in exact]
    assert sum(row["accepted_relaxed"] for row in never) == 0 < sum(row["accepted_relaxed"] for row in always)
    assert sum(row["steps"] for row in always) < sum(row["steps"] for row in exact)
    # The default comes from the function's signature.
    default = rows(run(*flags, *own))
    assert [row["tokens"] for row in default] == [
        row["tokens"] for row in rows(run(*flags, *own, "--rule-option", "entropy=1.5"))
    ]


@pytest.mark.slow
def test_rows_choose_the_numbers_of_a_rule(run, pair, gates, tmp_path):
    """Compare each row with a run of only that row: the tokens do not depend on the batch."""
    file = tmp_path / "p.jsonl"
    entropies = [ALWAYS, NEVER, None, 5.3, ALWAYS]
    lines = [{"prompt": "a story of", "seed": i % 2} for i in range(5)]
    lines = [line | ({} if e is None else {"entropy": e}) for line, e in zip(lines, entropies, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [*pair, "--ignore-eos", "--max-new-tokens", "24", "--json", "--verify", f"{gates}:entropy_gate"]
    common = ["--rule-option", "entropy=4.9"]
    together = rows(run(*flags, *common, "--prompts-file", file))
    pairs = rows(run(*flags, *common, "--prompts-file", file, "--batch-size", "2"))
    for row, other, entropy in zip(together, pairs, entropies, strict=True):
        given = ["--rule-option", f"entropy={4.9 if entropy is None else entropy}"]
        [alone] = rows(run(*flags, *given, "a story of"))
        assert row["tokens"] == other["tokens"] == alone["tokens"]
        assert row["accepted_relaxed"] == other["accepted_relaxed"] == alone["accepted_relaxed"]
    assert together[0]["accepted_relaxed"] > together[1]["accepted_relaxed"] == 0


@pytest.mark.slow
def test_rows_choose_the_numbers_of_a_rule_of_the_table(run, pair, tmp_path):
    file = tmp_path / "p.jsonl"
    lines = [{"theta": 0.5}, {"theta": 0.5, "max_relaxed_run": 0}, {"theta": "inf"}, {}, {"strict": True}]
    lines.append({"exact_prefix": 24})
    text = "".join(json.dumps({"prompt": "a story of"} | line) + "\n" for line in lines)
    file.write_text(text.replace('"inf"', "Infinity"))
    flags = [*pair, "--ignore-eos", "--max-new-tokens", "24", "--json"]
    found = rows(run(*flags, "--theta", "0.4", "--prompts-file", file))
    for row, given in zip(found, ("0.5", None, None, "0.4", None, None), strict=True):
        [alone] = rows(run(*flags, *(["--theta", given] if given else ["--verify", "exact"]), "a story of"))
        assert row["tokens"] == alone["tokens"]
    assert found[0]["accepted_relaxed"] > 0 == found[1]["accepted_relaxed"] == found[4]["accepted_relaxed"]
    for prefix in (["--exact-prefix", "24"], ["--rule-option", "exact_prefix=24"]):
        [row] = rows(run(*flags, "--theta", "0.4", *prefix, "a story of"))
        assert row["tokens"] == found[5]["tokens"] != found[3]["tokens"] and row["accepted_relaxed"] == 0


@pytest.mark.slow
def test_a_rule_of_ones_own_over_rejection_gets_a_sampled_draft(run, pair, gates):
    flags = [*pair, "--ignore-eos", "--max-new-tokens", "16", "--json", "--temperature", "1", "the sea"]
    own = ["--verify", f"{gates}:over_rejection", "--rule-option", f"entropy={NEVER}"]
    [ours] = rows(run(*flags, *own))
    [theirs] = rows(run(*flags, "--verify", "rejection"))
    assert ours["tokens"] == theirs["tokens"] and ours["depth_histogram"] == theirs["depth_histogram"]


@pytest.mark.slow
def test_compare_takes_it_too(run, pair, gates):
    argv = [*pair, "--max-new-tokens", "8", "--compare", "--json", "--verify", f"{gates}:entropy_gate"]
    argv += ["the sea"]
    [made] = rows(run(*argv))
    assert [row["rule"] for row in made["rules"]][:2] == ["autoregressive", "exact"] and len(
        made["rules"]
    ) == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rule-option", "entropy=high"], "--rule-option entropy is high: expected a number"),
        (["--rule-option", "theta=1"], "--rule-option theta does not apply to the rule entropy_gate, which has e"),
        (["--theta", "1"], "--theta does not apply to the rule entropy_gate, which has entropy: leave it out, or "),
        (["--block"], "--block does not apply to the rule entropy_gate"),
    ],
)  # fmt: skip
def test_what_it_does_not_have_is_refused(refused, gates, argv, message):
    flags = ["--target", "nowhere", "--verify", f"{gates}:entropy_gate", *argv, "hello"]
    assert refused(*flags).startswith(f"error: {message}")


def test_a_row_of_the_wrong_kind_is_named(refused, gates, tmp_path):
    file = tmp_path / "p.jsonl"
    flags = ["--target", "nowhere", "--verify", f"{gates}:entropy_gate", "--prompts-file", file]
    for row, message in (
        ({"entropy": "high"}, "entropy is 'high': expected a number"),
        ({"theta": 1}, "theta does not apply to the rule entropy_gate, which has entropy"),
        ({"entropi": 1}, "unknown key 'entropi' (did you mean entropy?): the keys are prompt, messages, "),
    ):
        file.write_text(json.dumps({"prompt": "a"} | row) + "\n")
        assert f"p.jsonl, line 1: {message}" in refused(*flags)


@pytest.mark.slow
def test_the_benchmark_measures_it_with_the_same_controls(pair, gates, tmp_path):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    flags = [*pair, "--task", f"jsonl={prompts}", "--max-new-tokens", 12, "--batch-size", 3]
    flags += ["--temperatures", 0]
    flags += ["--controls", "all", "--verify", f"{gates}:entropy_gate", "--rule-option", f"entropy={ALWAYS}"]
    assert benchmark.main([str(x) for x in (*flags, "--output", tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["settings"]["rule"] == {"verify": f"{gates}:entropy_gate", "settings": {"entropy": ALWAYS}}
    [table] = summary["tables"]
    arms = {arm["arm"]: arm for arm in table["arms"]}
    assert list(arms) == ["autoregressive", "exact", "entropy_gate entropy=0"]
    ours = arms["entropy_gate entropy=0"]
    assert ours["relaxed_share"] > 0 and ours["tau"] > arms["exact"]["tau"]
    assert f"rule {gates}:entropy_gate (entropy 0" in (tmp_path / "out" / "table.md").read_text()
    # The same command may continue in its folder; a different rule setting is refused.
    assert benchmark.main([str(x) for x in (*flags, "--output", tmp_path / "out")]) == 0
    assert benchmark.main([str(x) for x in (*flags[:-1], "entropy=1", "--output", tmp_path / "out")]) == 2


@pytest.mark.slow
def test_its_theta_can_be_calibrated(run, pair, gates, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the sea {i}"}) + "\n" for i in range(8)))
    flags = [*pair, "--task", f"jsonl={prompts}", "--max-new-tokens", 12, "--batch-size", 4, "--bound", 0.9]
    flags += ["--confidence", 0.5, "--output", tmp_path / "theta.json", "--verify"]
    assert calibrate.main([str(x) for x in (*flags, f"{gates}:thresholded")]) == 2
    assert "has no thresholds of its own: give --thetas" in capsys.readouterr().err
    assert calibrate.main([str(x) for x in (*flags, f"{gates}:entropy_gate")]) == 2
    assert "--verify entropy_gate has no theta to calibrate" in capsys.readouterr().err
    assert calibrate.main([str(x) for x in (*flags, f"{gates}:thresholded", "--thetas", NEVER, ALWAYS)]) == 0
    made = json.loads((tmp_path / "theta.json").read_text())
    assert made["rule"] == {"verify": f"{gates}:thresholded", "settings": {}} and made["theta"] == ALWAYS
    own = ["--verify", f"{gates}:thresholded", "--theta", tmp_path / "theta.json"]
    [row] = rows(run(*pair, "--max-new-tokens", 8, "--json", *own, "the sea"))
    [same] = rows(
        run(*pair, "--max-new-tokens", 8, "--json", *own[:2], "--rule-option", "theta=0", "the sea")
    )
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

    {method}


def gate():
    return {made}
"""
RAISES = "def low(self, evidence):\n        {} # here"
"""Source of a method whose second line fails."""
FAILURES = {
    "raise": (
        RAISES.format("raise ValueError('no\\nentropy')"),
        "low raised ValueError (no); expected low to return bool[B, N]",
    ),
    "exit": (RAISES.format("sys.exit(3)"), "low raised SystemExit (3); expected low to return bool[B, N]"),
    "helper": (
        "def low(self, evidence):\n        return self.help()\n    def help(self):\n        raise KeyError('x') # here",
        "help raised KeyError ('x'); expected low to return bool[B, N]",
    ),
    "inside jax": (
        RAISES.format("return jnp.ones(3) @ jnp.ones(4)"),
        "low raised TypeError (dot_general requires contracting dimensions to have the same shape, got (3,) and (4,)); "
        "expected low to return bool[B, N]",
    ),
    "dtype": (
        "def low(self, evidence): # here\n        return verify.entropy(evidence.logits)",
        "low returned float32[1, 3]; expected bool[1, 3]",
    ),
    "relaxable": (
        "def relaxable(self, evidence): # here\n        return 'all'",
        "relaxable returned 'all'; expected bool[1, 3]",
    ),
    "cost": (
        "def relaxable(self, evidence):\n        return evidence.tree.tokens > 0\n"
        "    def cost(self, evidence): # here\n        return self.theta, self.theta",
        "cost returned a cost float32[1]; expected a cost float32[1, 3]",
    ),
    "budget": (
        "def relaxable(self, evidence):\n        return evidence.tree.tokens > 0\n"
        "    def cost(self, evidence): # here\n        return self.theta",
        "cost returned float32[1]; expected (f32[B, N], f32[B]) or None",
    ),
    "spend": (
        "def relaxable(self, evidence):\n        return evidence.tree.tokens > 0\n"
        "    def cost(self, evidence):\n        return jnp.ones(evidence.tree.tokens.shape), self.theta\n"
        "    def spend(self, left): # here\n        return dataclasses.replace(self, theta=left[0])",
        "spend returned a rule whose theta is float32[]; expected a rule whose theta is float32[1]",
    ),
    "target": (
        "def target(self, log_p, log_q, evidence): # here\n        return log_p[:, 0]",
        "target returned float32[1, 269]; expected float32[1, 3, 269]",
    ),
    "no pair": (
        "def __call__(self, evidence): # here\n        return verify.exact()(evidence)[0]",
        "__call__ returned an object of type Verdict; expected (Verdict, rule)",
    ),
    "verdict": (
        "def __call__(self, evidence): # here\n        verdict, _ = verify.exact()(evidence)\n"
        "        return dataclasses.replace(verdict, next_token=verdict.next_token.astype('float32')), self",
        "__call__ returned a verdict whose next_token is float32[1]; expected a verdict whose next_token is int32[1]",
    ),
    "another rule": (
        "def __call__(self, evidence): # here\n        return verify.exact()(evidence)",
        "__call__ returned an object of type Exact; expected an object of type Gate with the same structure",
    ),
}
CONSTRUCTORS = {
    "raises": (
        "1 / 0 # here",
        "gate raised ZeroDivisionError (division by zero); expected gate to return a rule",
    ),
    "exits": ("sys.exit('stop') # here", "gate raised SystemExit (stop); expected gate to return a rule"),
    "no rule": ("3", "gate returned 3; expected a rule"),
}
IMPORTS = {
    "exit": ("import sys\nsys.exit(1) # here", "<module> raised SystemExit (1)"),
    "syntax": ("def gate(: # here", "SyntaxError (invalid syntax)"),
}


def failing(path, method="pass", made="Gate()"):
    path.write_text(
        FAILING.format(method=method, made=made, base="Retargeted" if "def target" in method else "Relaxed")
    )
    return path


def line_of(path, marker="# here"):
    return next(n for n, line in enumerate(path.read_text().splitlines(), start=1) if marker in line)


@pytest.mark.parametrize("kind", slow_but(FAILURES, "raise", "dtype"))
def test_a_method_that_fails_gets_one_sentence(kind, refused, pair, tmp_path):
    method, problem = FAILURES[kind]
    file = failing(tmp_path / "gate.py", method)
    sampled = ["--temperature", "1"] if kind == "target" else []
    sentence = refused(*pair, *sampled, "--max-new-tokens", "4", "--verify", f"{file}:gate", "the sea")
    assert sentence == f"error: the rule Gate fails in {file}, line {line_of(file)}: {problem}.\n"


@pytest.mark.parametrize("kind", slow_but(CONSTRUCTORS, "exits"))
def test_a_constructor_that_fails_gets_one_sentence(kind, refused, pair, tmp_path):
    made, problem = CONSTRUCTORS[kind]
    file = failing(tmp_path / "gate.py", made=made)
    line = line_of(file, "# here" if "# here" in made else "def gate")
    sentence = refused(*pair, "--verify", f"{file}:gate", "the sea")
    assert sentence.startswith(f"error: the rule is {file}:gate: {file}, line {line}: {problem}")


@pytest.mark.parametrize("kind", slow_but(IMPORTS, "exit", "syntax"))
def test_a_file_that_fails_gets_one_sentence(kind, refused, tmp_path):
    source, problem = IMPORTS[kind]
    file = tmp_path / "gate.py"
    file.write_text(source)
    expected = (
        f"error: the file of a rule '{file}' does not run: {file}, line {line_of(file)}: {problem}; expected a file "
        "that defines a function that makes a rule.\n"
    )
    assert refused("--target", "nowhere", "--verify", f"{file}:gate", "the sea") == expected


@pytest.mark.slow
def test_an_attribute_that_fails_gets_one_sentence(refused, pair, tmp_path):
    method = "@property\n    def needs(self):\n        raise OSError('gone') # here"
    file = failing(tmp_path / "gate.py", method)
    sentence = refused(*pair, "--verify", f"{file}:gate", "the sea")
    assert sentence == f"error: {file}, line {line_of(file)}: needs raised OSError (gone).\n"
