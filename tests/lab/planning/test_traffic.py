"""Bytes of instructions, against counts by hand."""

from __future__ import annotations

import pytest

from mars_jax.lab.planning import hlo
from mars_jax.lab.planning.traffic import Traffic, traffic

HEAD = """HloModule hand
%sliced (p0: f32[64,128], p1: s32[]) -> f32[8,128] {
  %p0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[8,128]{1,0:T(8,128)} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={8,128}
}

%renamed (r0: f32[64,128]) -> f32[128,64] {
  %r0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %b = f32[128,64]{0,1:T(8,128)} bitcast(%r0)
}

%nested (n0: f32[64,128], n1: f32[8,128]) -> f32[8,64] {
  %n0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %n1 = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)
  %inner = f32[128,64]{0,1:T(8,128)} fusion(%n0), kind=kLoop, calls=%renamed
  ROOT %conv = f32[8,64]{1,0:T(8,128)} convolution(%n1, %inner), dim_labels=bf_io->bf
}

%updated (u0: f32[64,128], u1: f32[1,128], u2: s32[]) -> f32[64,128] {
  %u0 = f32[64,128]{1,0:T(1,128)} parameter(0)
  %u1 = f32[1,128]{1,0:T(1,128)} parameter(1)
  %u2 = s32[]{:T(128)} parameter(2)
  %nil = s32[] constant(0)
  ROOT %dus = f32[64,128]{1,0:T(1,128)} dynamic-update-slice(%u0, %u1, %u2, %nil)
}

ENTRY %main (x: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %row = f32[1,128]{1,0:T(1,128)S(1)} parameter(1)
  %rows = f32[64,128]{1,0:T(1,128)} parameter(2)
  %i = s32[]{:T(128)} parameter(3)
  %v = f32[8,128]{1,0:T(8,128)S(1)} parameter(4)
"""
WHOLE, SLICE = 64 * 128 * 4, 8 * 128 * 4


def of(line: str) -> Traffic:
    module = hlo.parse(f"{HEAD}  ROOT %out = {line}\n}}\n")
    entry = module.computations["main"]
    return traffic(module, entry, entry.root)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[64,128]{1,0:T(8,128)} copy(%x)", (WHOLE, WHOLE)),
        ("f32[64,128]{1,0:T(8,128)S(1)} copy(%x)", (WHOLE, 0)),
        ("f32[64,128]{1,0:T(8,128)} bitcast(%x)", (0, 0)),
        ("f32[8,128]{1,0:T(8,128)S(1)} fusion(%x, %i), kind=kLoop, calls=%sliced", (SLICE, 0)),
        ("f32[8,64]{1,0:T(8,128)} fusion(%x, %v), kind=kOutput, calls=%nested", (WHOLE, 8 * 128 * 4)),
        ("f32[64,128]{1,0:T(1,128)} fusion(%rows, %row, %i), kind=kLoop, calls=%updated", (0, 512)),
        ("f32[64,128]{1,0:T(1,128)} dynamic-update-slice(%rows, %row, %i, %i)", (0, 512)),
        (
            "(f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)",
            (WHOLE, 0),
        ),
        (
            "((f32[64,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x), "
            "slice={[0:8], [0:128]}",
            (SLICE, 0),
        ),
        ("f32[64,128]{1,0:T(8,128)S(1)} copy-done(%x)", (0, 0)),
        ('f32[64,128]{1,0} custom-call(%x), custom_call_target="ConcatBitcast"', (0, 0)),
        (
            "(f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(1,128)}) "
            'custom-call(%x, %rows, %row), custom_call_target="tpu_custom_call", '
            "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, metadata={}",
            (2 * WHOLE, SLICE),
        ),
        ("f32[8,128]{1,0:T(8,128)} all-reduce(%v), replica_groups={{0,1}}", (0, SLICE)),
    ],
)
def test_bytes_to_and_from_hbm(line, expected):
    assert of(line) == expected
