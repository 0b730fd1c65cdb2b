"""Tests of `scripts/kernels/gpu_step.py` on a CPU with a tiny shape."""

import json
import sys

import pytest

from scripts.kernels import gpu_step


def test_operations_are_counted_in_the_largest_loop_and_inside_its_fusions():
    text = """
%fused (p: bf16[4,8]) -> bf16[8,8] {
  ROOT %c = bf16[8,8]{1,0} concatenate(%p, %p), dimensions={0}
}
%branch (p: f32[2]) -> f32[2] {
  ROOT %d = f32[2]{0} copy(%p)
}
%body (p: (f32[2], bf16[4,8])) -> (f32[2], bf16[4,8]) {
  %f = bf16[8,8]{1,0} fusion(%b), kind=kLoop, calls=%fused
  %e = bf16[6144,4096]{1,0} concatenate(%q, %k, %v), dimensions={0}
  %g = f32[2]{0} conditional(%i, %a, %a), branch_computations={%branch, %branch}
  ROOT %t = (f32[2]{0}, bf16[4,8]{1,0}) tuple(%g, %b)
}
%small (p: f32[2]) -> f32[2] {
  ROOT %h = f32[2]{0} copy(%p)
}
ENTRY %main (x: f32[2]) -> f32[2] {
  %w = (f32[2]{0}, bf16[4,8]{1,0}) while(%x), condition=%cond, body=%body
  ROOT %v = f32[2]{0} while(%x), condition=%cond, body=%small
}
"""
    concatenated = {"bf16[8,8]": 1, "bf16[6144,4096]": 1}
    counts = {"concatenate": 1, "copy": 1, "fusion": 1, "fused concatenate": 1}
    assert gpu_step.loop_operations(text) == counts | {"concatenated": concatenated}


@pytest.mark.slow
def test_sections_are_measured_and_an_option_that_xla_lacks_is_reported(monkeypatch, tmp_path):
    path = tmp_path / "report.json"
    monkeypatch.setitem(gpu_step.VARIANTS, "unknown", gpu_step.Variant({"xla_gpu_no_such_option": 1}))
    prompts = "no dot merger, graphs"
    sections = [("device", "default"), ("steps", "joined"), ("prompts", prompts), ("prompts", "unknown")]
    monkeypatch.setitem(gpu_step.SECTIONS, "tiny", sections)
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", "--shape", "tiny", "--output", str(path)])
    gpu_step.main()
    report = json.loads(path.read_text())
    assert {section["status"] for section in report["sections"].values()} == {"complete"}
    rows = {name: section["rows"] for name, section in report["sections"].items()}
    [device] = rows["device: default"]
    assert device["copy_bytes_per_second"] > 0
    assert "xla_gpu_no_such_option" in device["unsupported"]["unknown"]
    assert "default" not in device["unsupported"]
    [step] = rows["steps: joined"]
    assert step["tau"] == 1 and step["tokens_per_second"] == pytest.approx(1e3 / step["milliseconds"])
    assert step["loop"]["fusion"] > 0
    assert [row["chunk"] for row in rows[f"prompts: {prompts}"]] == [16, 32]
    assert all(row["milliseconds"] > 0 for row in rows[f"prompts: {prompts}"])
    assert "prompts: unknown" not in rows
