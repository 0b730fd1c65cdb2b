"""Tests of `mars-jax check`: correct kernels and tokens pass, and faults are reported."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from kernels_pallas.margin import mosaic
from mars_jax import hub
from mars_jax.lab.commands.check import device_check, kernels, large, tokens
from mars_jax.lab.commands.check.device_check import main, wrong_rows
from mars_jax.serve.likelihood import score


@pytest.fixture
def small(monkeypatch):
    """Use small vocabularies, so that the checks are fast."""
    monkeypatch.setattr(kernels, "VOCABULARIES", dict.fromkeys(kernels.VOCABULARIES, 300))
    monkeypatch.setattr(kernels, "ROUNDS", 1)


@pytest.mark.slow
def test_a_kernel_with_a_wrong_result_differs(small, monkeypatch):
    correct = mosaic.margin_accept

    def broken(*operands, **options):
        result = correct(*operands, **options)
        return result._replace(next_token=result.next_token + 1)

    monkeypatch.setattr(mosaic, "margin_accept", broken)
    wrong = wrong_rows(kernels.check_kernels())
    assert len(wrong) == 2 and all("margin_accept as pallas_tpu" in sentence for sentence in wrong)
    assert all(sentence.endswith("differs (next_token (12 of 12))") for sentence in wrong)


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_fails_with_its_reason(small, monkeypatch):
    def broken(*operands, **options):
        raise NotImplementedError("no rule for this op\nand more")

    monkeypatch.setattr(mosaic, "margin_stats", broken)
    assert wrong_rows(kernels.check_kernels()) == [
        f"margin_stats as pallas_tpu, [12, 8, 300] {dtype}: failed (NotImplementedError: no rule for this op)"
        for dtype in ("float32", "bfloat16")
    ]


def test_the_kernel_of_a_tpu_is_compiled_unless_it_is_off(monkeypatch):
    assert kernels.forms("tpu")["pallas_tpu"] == "compiled"
    monkeypatch.setenv("MARS_JAX_PALLAS", "0")
    assert "pallas_tpu" not in kernels.forms("tpu")


# Tokens.


@pytest.fixture
def loaded(target):
    return hub.load(str(target), dtype="float32")


@pytest.fixture
def texts(loaded):
    """Return a prompt, its greedy continuation, one that ends with the runner-up, and the gap of the two in nats."""
    prompt, best = [3, 5, 8], []
    for _ in range(4):
        scored = score(loaded, [[*prompt, *best, 0]])[0]
        best.append(int(scored.best[-1]))
    runner_up = [*best[:-1], int(scored.second[-1])]
    return prompt, best, runner_up, float(scored.z1[-1] - scored.z2[-1])


def test_a_token_that_is_not_the_best_differs(loaded, texts):
    prompt, best, runner_up, gap = texts
    row = tokens.compare_with_target(loaded, [prompt, prompt], [best, runner_up])
    assert gap > tokens.TIE
    detail = f"token 3 after [3, 5, 8] is {runner_up[3]} in place of {best[3]}"
    assert row == {"status": "differs", "detail": detail}
    assert wrong_rows([row | {"way": "a tree"}]) == [f"a tree: differs ({detail})"]


def test_a_tie_is_not_wrong(loaded, texts, monkeypatch):
    prompt, _, runner_up, gap = texts
    monkeypatch.setattr(tokens, "TIE", gap + 1e-4)
    row = tokens.compare_with_target(loaded, [prompt], [runner_up])
    assert row == {"status": "equal up to ties", "detail": "1 ties"} and wrong_rows([row]) == []


# The command.

EQUAL = {"operation": "margin_stats", "implementation": "xla", "how": "compiled", "shape": "[1, 2]"}
EQUAL |= {"dtype": "float32", "status": "equal", "detail": None, "milliseconds": 0.5}


@pytest.fixture
def sections(monkeypatch):
    """Replace the sections by stand-ins and return their results, which tests may change."""
    results = {
        "kernels": [EQUAL],
        "tokens": [{"way": "a tree", "tokens": 4, "tau": 2.5, "status": "equal", "detail": None}],
        "large": {"missing": "no accelerator"},
    }
    monkeypatch.setattr(kernels, "check_kernels", lambda: results["kernels"])
    monkeypatch.setattr(tokens, "check_tokens", lambda: results["tokens"])
    monkeypatch.setattr(large, "check_large", lambda: results["large"])
    monkeypatch.setattr(device_check, "keep_compilations", lambda: None)
    return results


def test_a_report_names_versions_and_device(sections, capsys, tmp_path):
    assert main(["--json", "--output", str(tmp_path / "check.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "check.json").read_text())
    assert printed["versions"]["jax"] == jax.__version__ and printed["wrong"] == []
    assert (printed["device"]["platform"], printed["device"]["count"]) == ("cpu", jax.device_count())
    assert {name: printed[name] for name in sections} == sections


PLAIN = {"arm": "plain", "rows": 1, "bytes": 5 * 10**9, "flops": 10**10, "milliseconds": 6.25}
PLAIN |= {"tau": 1.0, "tokens_per_second": 160.0}
TREE = {"arm": "tree", "rows": 32, "bytes": 1, "flops": 1, "failed": "RESOURCE_EXHAUSTED: no room"}
LARGE = {"target": "an 8B", "dtype": "int4", "context": 4096, "steps": [PLAIN, TREE]}
LARGE |= {"copy_bytes_per_second": 1e12, "product_flops": 2e14}
LARGE |= {"prompt": {"tokens": 4096, "flops": 10**13, "milliseconds": 80.0}}


def test_times_of_a_large_model_stand_next_to_the_limits_of_the_device(sections, capsys):
    sections["large"] = LARGE
    assert main([]) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    assert cells["plain"] == ["1", "6.25", "5.00", "0.05", "1.00", "160"]
    assert cells["the prompt"] == ["1", "80.00", "", "50.00", "", ""]
    assert cells["tree"][:2] == ["32", "RESOURCE_EXHAUSTED: no room"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_a_large_model_is_timed_with_simulated_acceptance(dtype, monkeypatch):
    monkeypatch.setattr(large, "COPIED", 2**20)
    monkeypatch.setattr(large, "SIDE", 64)
    full = large.CONFIGS[large.TARGET]
    sizes = {"num_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "windows": ()}
    config = dataclasses.replace(full, **sizes, num_heads=4, num_kv_heads=2, head_dim=16)
    report = large.measure(config, dtype, rows=2, context=64)
    assert report["prompt"]["milliseconds"] > 0
    taus = {(row["arm"], row["rows"]): row["tau"] for row in report["steps"]}
    assert len(taus) == 5 and taus["plain", 1] == taus["plain", 2] == 1
    assert taus["chain of 5", 1] == pytest.approx(large.CHAIN.tau, abs=1)
    assert taus["tree 10-7-60", 2] == pytest.approx(large.TREE.tau, abs=1.5)
    single, *_, double, _ = report["steps"]
    bits = {"bfloat16": 16, "int4": 4}[dtype]
    # For any number of rows, a step reads all weights except the embedding once. The head's weights are wide.
    assert single["bytes"] < double["bytes"] < 2 * single["bytes"] and double["flops"] == 2 * single["flops"]
    assert single["bytes"] * 8 / (single["flops"] / 2) > bits


def test_a_section_that_fails_is_reported_and_the_others_run(sections, monkeypatch, capsys, tmp_path):
    def fails():
        raise RuntimeError("INTERNAL: the driver is gone\nand a page")

    monkeypatch.setattr(tokens, "check_tokens", fails)
    assert main(["--output", str(tmp_path / "check.json")]) == 1
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["wrong"] == ["tokens: RuntimeError: INTERNAL: the driver is gone"]
    assert report["tokens"] is None and report["large"] == sections["large"]
    assert "wrong: tokens: RuntimeError: INTERNAL: the driver is gone" in capsys.readouterr().out


@pytest.mark.parametrize("name", [".", "missing/check.json"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr(device_check, "make_report", lambda output: pytest.fail("minutes of work"))
    assert main(["--output", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --output ") and err.count("\n") == 1


@pytest.mark.slow
def test_on_this_machine_nothing_is_wrong(tmp_path):
    argv = [sys.executable, "-m", "mars_jax", "check", "--json", "--output", str(tmp_path / "check.json")]
    process = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout)
    rows = report["kernels"]
    assert {row["status"] for row in rows} == {"equal"} and len(rows) == 27
    assert {row["implementation"] for row in rows} == {"xla", "partitioned", "pallas_tpu", "default"}
    assert all((row["milliseconds"] is None) == (row["how"] == "interpreted") for row in rows)
    assert len(report["tokens"]) == 5 and all(row["tokens"] == 192 for row in report["tokens"])
    assert {row["status"] for row in report["tokens"]} <= {"equal", "equal up to ties"}
    assert report["large"] == {"missing": "an accelerator with 12 GiB of memory is needed"}
    assert all(row["tau"] > 2 for row in report["tokens"][1:])


def test_the_cases_accept_and_relax_tokens():
    results = [kernels._reference(c) for c in kernels.cases(300) if c.operation == "margin_accept"]
    assert all(np.any(result.num_accepted > 0) for result in results)
    assert sum(int(result.relaxed.sum()) for result in results) >= 10
    assert not any(np.any(result.relaxed[1::4]) for result in results), "these rows are strict"
