"""`mars-jax check`: what is right is told as right, and what is broken as broken."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kernels_pallas import api
from mars_jax import hub
from mars_jax.lab.commands.check import device_check, kernels, large, speed, tokens
from mars_jax.lab.commands.check.device_check import main, wrong_kernels, wrong_tokens
from mars_jax.lab.commands.check.timing import looped
from mars_jax.serve.likelihood import score


@pytest.fixture
def small(monkeypatch):
    """Small vocabularies, so that nothing takes long."""
    monkeypatch.setattr(kernels, "COMPILED", 300)
    monkeypatch.setattr(kernels, "INTERPRETED", 300)
    monkeypatch.setattr(kernels, "TIMES", 1)


# Kernels.


def test_the_cases_hold_what_can_go_wrong():
    """A suite in which nothing is accepted or relaxed would prove little."""
    found = [result for case, result in kernels._expected(300) if case.operation == "margin_accept"]
    assert all(np.any(result.num_accepted > 0) for result in found)
    assert sum(int(result.relaxed.sum()) for result in found) >= 10
    assert not any(np.any(result.relaxed[1::4]) for result in found), "these rows are strict"
    ties = [
        r
        for case, r in kernels._expected(300)
        if (case.operation, case.dtype) == ("margin_stats", "bfloat16")
    ]
    assert any(np.any(result.top1 == result.top2) for result in ties)


@pytest.mark.slow
def test_every_form_equals_the_reference(small):
    rows = kernels.check_kernels("cpu")
    assert {(row["implementation"], row["how"]) for row in rows} == {
        ("xla", "compiled"),
        ("partitioned", "compiled"),
        ("pallas_tpu", "interpreted"),
        ("default", "compiled"),
    }
    assert {row["status"] for row in rows} == {"equal"} and wrong_kernels(rows) == []
    assert all((row["milliseconds"] is None) == (row["how"] == "interpreted") for row in rows)


@pytest.mark.slow
def test_a_kernel_with_a_wrong_result_is_told_as_broken(small, monkeypatch):
    sound = api.mosaic.margin_tpu.margin_accept

    def broken(*operands, **options):
        found = sound(*operands, **options)
        return found._replace(next_token=found.next_token + 1)

    monkeypatch.setattr(api.mosaic.margin_tpu, "margin_accept", broken)
    rows = kernels.check_kernels("cpu")
    wrong = wrong_kernels(rows)
    assert len(wrong) == 2 and all("margin_accept as pallas_tpu" in sentence for sentence in wrong)
    assert all(sentence.endswith("differs (next_token (12 of 12))") for sentence in wrong)
    assert sum(row["status"] == "equal" for row in rows) == len(rows) - 2


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_told_with_its_reason(small, monkeypatch):
    def broken(*operands, **options):
        raise NotImplementedError("no rule for this op\nand more")

    monkeypatch.setattr(api.mosaic.margin_tpu, "margin_stats", broken)
    wrong = wrong_kernels(kernels.check_kernels("cpu"))
    assert wrong == [
        f"margin_stats as pallas_tpu, [12, 8, 300] {dtype}: failed (NotImplementedError: no rule for this op)"
        for dtype in ("float32", "bfloat16")
    ]


def test_experts_that_multiply_wrongly_are_told(monkeypatch):
    monkeypatch.setattr(kernels.moe, "dense_by_expert", lambda x, w, sizes: (x @ w[0].T).astype("float32"))
    (sentence,) = wrong_kernels([kernels._product(*kernels._experts())])
    assert "dense_by_expert as default" in sentence and "differs (off by" in sentence


def test_a_chip_is_held_to_its_own_kernel_unless_that_is_switched_off(monkeypatch):
    (form,) = [form for form in kernels.forms("tpu") if form.name == "pallas_tpu"]
    assert form.required and form.how == "compiled"
    monkeypatch.setenv("MARS_JAX_PALLAS", "0")
    (form,) = [form for form in kernels.forms("tpu") if form.name == "pallas_tpu"]
    assert not form.required


# Tokens.


@pytest.fixture
def loaded(target):
    return hub.load(str(target), dtype="float32")


@pytest.fixture
def text(loaded):
    """A prompt, what the target says after it, and the same with the runner-up at the end; and how far that is."""
    prompt, said = [3, 5, 8], []
    for _ in range(4):
        scored = score(loaded, [[*prompt, *said, 0]])[0]
        said.append(int(scored.best[-1]))
    other = [*said[:-1], int(scored.second[-1])]
    return prompt, said, other, float(scored.z1[-1] - scored.z2[-1])


def test_tokens_that_differ_are_told_with_how_far_they_are(loaded, text):
    prompt, said, other, gap = text
    assert tokens.compare(loaded, [prompt], [said], [said]) == {"status": "equal", "detail": None}
    found = tokens.compare(loaded, [prompt, prompt], [said, said], [said, other])
    assert found["status"] == "differs" and gap > tokens.TIE
    assert found["detail"] == f"token 3 of 4 is {other[3]} in place of {said[3]}, {gap:.1e} nats from it"
    assert wrong_tokens([found | {"way": "a tree"}]) == [f"a tree: differs ({found['detail']})"]
    assert tokens.compare(loaded, [prompt], [said], [said[:2]])["detail"] == "2 tokens in place of 4"


def test_a_tie_is_no_error(loaded, text, monkeypatch):
    prompt, said, other, gap = text
    monkeypatch.setattr(tokens, "TIE", gap + 1e-4)
    found = tokens.compare(loaded, [prompt], [said], [other])
    assert found == {"status": "equal up to ties", "detail": "in 1 of 1 texts"}
    assert wrong_tokens([found]) == []


def test_autoregression_is_held_against_one_forward(loaded, text, monkeypatch):
    prompt, said, other, gap = text
    assert tokens._chosen(loaded, [prompt], [said])["status"] == "equal"
    assert tokens._chosen(loaded, [prompt], [other])["status"] == "differs"
    monkeypatch.setattr(tokens, "TIE", gap + 1e-4)
    assert tokens._chosen(loaded, [prompt], [other])["status"] == "equal up to ties"


# The command.

EQUAL = {
    "operation": "margin_stats",
    "implementation": "xla",
    "how": "compiled",
    "shape": "[1, 2]",
    "dtype": "float32",
    "required": True,
    "status": "equal",
    "detail": None,
    "milliseconds": 0.5,
}
ARM = {
    "arm": "autoregression",
    "step_milliseconds": 2.0,
    "tokens_per_second": 500.0,
    "tau": 1.0,
    "speedup": 1.0,
    "speedup_range": [1.0, 1.0],
}


@pytest.fixture
def sections(monkeypatch):
    """The three sections without their work: their results, to be changed."""
    made = {
        "kernels": [EQUAL],
        "tokens": [{"way": "a tree", "tokens": 4, "tau": 2.5, "status": "equal", "detail": None}],
        "speed": {
            "dtype": "float32",
            "arms": [ARM, ARM | {"arm": "exact"}],
            "plan": {"missing": "of no TPU"},
        },
    }
    monkeypatch.setattr(kernels, "check_kernels", lambda platform, tick: made["kernels"])
    monkeypatch.setattr(tokens, "check_tokens", lambda tick: made["tokens"])
    monkeypatch.setattr(speed, "check_speed", lambda tick: made["speed"])
    monkeypatch.setattr("mars_jax.lab.commands.check.device_check.keep_compilations", lambda: None)
    return made


def test_a_report_names_versions_and_device(sections, capsys, tmp_path):
    assert main(["--json", "--output", str(tmp_path / "check.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "check.json").read_text())
    assert printed["versions"]["jax"] == jax.__version__ and printed["wrong"] == []
    assert (printed["device"]["platform"], printed["device"]["count"]) == ("cpu", jax.device_count())
    assert {name: printed[name] for name in sections} == sections


def test_a_report_is_for_people_too(sections, capsys):
    sections["speed"]["plan"] = {
        "step": {"low_seconds": 1e-3, "high_seconds": 2e-3},
        "floor_seconds": 5e-4,
        "autoregressive_step": None,
        "autoregressive_floor_seconds": 1e-4,
    }
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "1.000 to 2.000" in out and "0.500" in out and "nothing is wrong" in out
    sections["kernels"] = [EQUAL | {"status": "differs", "detail": "top1 (1 of 2)"}]
    sections["speed"]["plan"] = {"missing": "of no TPU"}
    assert main([]) == 1
    out = capsys.readouterr().out
    assert (
        "wrong: margin_stats as xla, [1, 2] float32: differs (top1 (1 of 2))" in out
        and "no plan: of no TPU" in out
    )


LARGE = {
    "target": "an 8B",
    "dtype": "int4",
    "context": 4096,
    "copy_bytes_per_second": 1e12,
    "product_flops": 2e14,
    "prompt": {"tokens": 4096, "flops": 10**13, "milliseconds": 80.0},
    "steps": [
        {"arm": "plain", "rows": 1, "bytes": 5 * 10**9, "flops": 10**10, "milliseconds": 6.25}
        | {"tau": 1.0, "tokens_per_second": 160.0},
        {"arm": "tree", "rows": 32, "bytes": 1, "flops": 1, "failed": "RESOURCE_EXHAUSTED: no room"},
    ],
}


def test_times_of_a_large_model_stand_beside_what_the_device_can_do(sections, monkeypatch, capsys):
    monkeypatch.setattr(large, "check_large", lambda tick: LARGE)
    assert main([]) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    said = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert said["plain"] == ["1", "6.25", "5.00", "0.05", "1.00", "160"]
    assert said["the prompt"] == ["1", "80.00", "", "50.00", "", ""]
    assert said["tree"][:2] == ["32", "RESOURCE_EXHAUSTED: no room"]


def test_without_an_accelerator_no_large_model_is_made():
    assert large.check_large() == {"missing": "an accelerator with 12 GiB of memory is needed"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_a_large_model_is_timed_with_acceptance_by_chance(dtype, monkeypatch):
    monkeypatch.setattr(large, "COPIED", 2**20)
    monkeypatch.setattr(large, "SIDE", 64)
    full = large.CONFIGS[large.TARGET]
    sizes = {"num_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "windows": ()}
    config = dataclasses.replace(full, **sizes, num_heads=4, num_kv_heads=2, head_dim=16)
    found = large.measured(config, dtype, rows=2, context=64)
    assert found["prompt"]["milliseconds"] > 0
    taus = {(row["arm"], row["rows"]): row["tau"] for row in found["steps"]}
    assert len(taus) == 5 and taus["plain", 1] == taus["plain", 2] == 1
    assert taus["chain of 5", 1] == pytest.approx(large.CHAIN.tau, abs=1)
    assert taus["tree 10-7-60", 2] == pytest.approx(large.TREE.tau, abs=1.5)
    plain, *_, many, _ = found["steps"]
    bits = {"bfloat16": 16, "int4": 4}[dtype]
    # All weights but the embedding, once, however many rows: the head's are wide.
    assert plain["bytes"] < many["bytes"] < 2 * plain["bytes"] and many["flops"] == 2 * plain["flops"]
    assert plain["bytes"] * 8 / (plain["flops"] / 2) > bits


def test_a_loop_calls_as_often_as_it_is_asked_to():
    calls = []
    run = looped(
        lambda x: jax.pure_callback(lambda x: calls.append(1) or x, x, x), 5, (np.ones(2, np.float32),)
    )
    assert run().tolist() == [1, 1] and len(calls) == 5


def test_a_section_that_dies_is_told_and_the_others_go_on(sections, monkeypatch, capsys, tmp_path):
    def dies(tick):
        raise RuntimeError("INTERNAL: the driver is gone\nand a page")

    monkeypatch.setattr(tokens, "check_tokens", dies)
    assert main(["--output", str(tmp_path / "check.json")]) == 1
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["wrong"] == ["tokens: RuntimeError: INTERNAL: the driver is gone"]
    assert found["tokens"] is None and found["speed"] == sections["speed"]
    assert "wrong: tokens: RuntimeError: INTERNAL: the driver is gone" in capsys.readouterr().out


def test_an_output_that_cannot_be_is_refused_at_once(sections, capsys, tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "check.json"):
        assert main(["--output", str(path)]) == 2
        told = f"error: --output is '{path}': expected a file in a folder that exists.\n"
        assert capsys.readouterr() == ("", told)


def test_an_output_that_takes_nothing_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(device_check, "make_report", lambda: pytest.fail("minutes of work"))
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/proc/check.json"), tmp_path / ("x" * 300), tmp_path / "pipe"):
        assert main(["--output", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: --output ") and err.count("\n") == 1


def test_a_device_without_plans_says_so():
    assert "this device is NVIDIA H100" in speed.plan_of("NVIDIA H100", 64, "bfloat16")["missing"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU v5", "TPU v4"])
def test_a_chip_has_a_plan(kind):
    plan = speed.plan_of(kind, 96, "bfloat16")
    assert plan["topology"] == speed.SLICES[kind]
    assert 0 < plan["autoregressive_floor_seconds"] < plan["floor_seconds"] < plan["step"]["low_seconds"]


@pytest.mark.slow
def test_on_this_machine_nothing_is_wrong(tmp_path):
    argv = [sys.executable, "-m", "mars_jax", "check", "--json", "--output", str(tmp_path / "check.json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {row["status"] for row in found["kernels"]} == {"equal"} and len(found["kernels"]) == 27
    assert len(found["tokens"]) == 5 and all(row["tokens"] == 192 for row in found["tokens"])
    assert {row["status"] for row in found["tokens"]} <= {"equal", "equal up to ties"}
    assert all(row["tau"] > 2 for row in found["tokens"][1:])
    plain, exact, mars = found["speed"]["arms"]
    assert plain["tau"] == 1 and mars["tau"] > exact["tau"] > 2
    assert all(arm["step_milliseconds"] > 0 for arm in (plain, exact, mars))
    assert "this device is cpu" in found["speed"]["plan"]["missing"]
