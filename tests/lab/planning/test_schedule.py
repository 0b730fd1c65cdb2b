"""Tests of the reader of libtpu schedules, on a stored dump and on small programs counted by hand."""

import importlib
from pathlib import Path

import pytest

from scripts.tpu_schedule import bundles, hlo
from scripts.tpu_schedule.step import Reader, step_cost
from scripts.tpu_schedule.traffic import moved_bytes

TINY = Path(__file__).parent / "data" / "tiny_loop"
CHIP = {"generation": "v5e", "bandwidth": 819e9, "live": 1024}


@pytest.fixture(scope="module")
def tiny():
    return hlo.parse((TINY / "hlo.txt").read_text()), bundles.read(TINY)


@pytest.fixture(scope="module")
def ops(tiny):
    return {op.name: op for op in Reader(*tiny, live=1024).step()}


def test_a_product_reads_its_quarter_of_the_weights_and_its_input(ops):
    product = ops["fusion.8"]
    assert (product.part, product.times) == ("target/mlp", 1)
    assert product.bytes == 1024 * 1024 * 2 + 8 * 1024 * 2


def test_a_block_of_the_cache_is_read_in_each_turn_and_a_row_is_written(ops):
    block, row = ops["convert_reduce_fusion.2"], ops["bitcast_dynamic-update-slice_fusion.2"]
    assert (block.part, block.times, block.bytes) == ("target/attention", 4, 256 * 8 * 1024 * 2)
    assert row.bytes == 8 * 1024 * 2


def test_a_collective_has_its_size_and_its_group(ops):
    reduce = ops["all-reduce.4"]
    assert (reduce.received, reduce.devices, reduce.bundles) == (8 * 1024 * 2, 4, 0)
    assert sum(op.devices > 0 for op in ops.values()) == 2


def test_the_parts_of_a_step_add_up(tiny, ops):
    cost = step_cost(*tiny, **CHIP)
    launches = sum(op.times for op in ops.values() if op.is_launch)
    assert cost.launches == launches == sum(part.launches for part in cost.parts.values())
    assert cost.bytes_seconds * 819e9 == pytest.approx(sum(op.times * op.bytes for op in ops.values()))
    assert cost.high_seconds - cost.low_seconds == pytest.approx(launches * 1.3e-6)
    assert cost.low_seconds > sum(cost.seconds.values()) > 0


def test_a_program_that_cannot_be_read_is_an_error(tiny):
    module, schedule = tiny
    with pytest.raises(ValueError, match="is called and has no routine"):
        step_cost(module, schedule._replace(routines={}), **CHIP)
    with pytest.raises(ValueError, match="writes an array and the schedule does not call it"):
        step_cost(module, schedule._replace(top=bundles.Routine([])), **CHIP)


OFFLOADED = """HloModule offloaded
%called (param: bf16[10,4096], token: token[]) -> bf16[10,4096] {
  %token = token[] parameter(1)
  %param = bf16[10,4096]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[10,4096]{1,0} all-reduce(%param), replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}
}

ENTRY %main (x: bf16[10,4096]) -> bf16[10,4096] {
  %x = bf16[10,4096]{1,0} parameter(0)
  %begun.call-start = ((bf16[10,4096]{1,0}), bf16[10,4096]{1,0}) call-start(%x), to_apply=%called
  ROOT %begun.call-done = bf16[10,4096]{1,0} call-done(%begun.call-start)
}
"""


def test_a_collective_of_the_sparse_cores_of_a_tpu7x_counts_once():
    nothing = bundles.Schedule(bundles.Routine([]), {})
    (op,) = Reader(hlo.parse(OFFLOADED), nothing, live=1).step()
    assert (op.opcode, op.devices, op.sent) == ("all-reduce", 8, 2 * 10 * 4096)


KERNEL = """
     0   :  {{ %s1_s0 = smov 0 }} /* Start region 1 */
   0x1 LB: > {{ %s3_s2 = sphi %s1_s0, %s4_s0  ;;  %s4_s0 = sadd.s32 1, %s3_s2 }} /* Start region 7 */
   0x2   : > {{ %p5_p0 = scmp.{test}.s32.totalorder %s3_s2, {bound}  ;;  %20 = sst [smem:[#allocation1_spill]] %s4_s0 }}
   0x3   : > {{ %6 = sbr.rel ({predicate}) target = $region9 }}
   0x4   : > {{}}
   0x5   : > {{}}
   0x6   : > {{}}
   0x7   : > {{}}
   0x8   : > {{ %v1_v0 = vld [vmem:[%s3_s2]] }}
   0x9   : > {{ %s9_s5 = sld [smem:[#allocation1_spill]] }} /* Start/End empty region 9 */
   0xa   : > {{ %p8_p1 = scmp.ge.s32.totalorder %s9_s5, 10 /* loop exit test */ }}
   0xb   : > {{ %10 = sbr.rel (!%p8_p1) target = $region7 }}
   0xc   : > {{}}
   0xd   : > {{}}
   0xe   : > {{}}
   0xf   : > {{}} /* End region 7 */
   0x10  :  {{ %11 = vtrace 1 }}
"""


@pytest.mark.parametrize(
    ("test", "bound", "predicate", "skipped"),
    [
        ("ne", "0", "%p5_p0", 9),
        ("ne", "0", "!%p5_p0", 1),
        ("lt", "7", "%p5_p0", 7),
        ("ne", "%s99_s9", "%p5_p0", 0),
    ],
    ids=["the first turn", "all but the first turn", "the last three turns", "not taken if unknown"],
)
def test_a_predicated_region_counts_in_the_turns_in_which_it_runs(test, bound, predicate, skipped):
    routine = bundles.parse(KERNEL.format(test=test, bound=bound, predicate=predicate))
    # A turn has 15 bundles and skips one: the four bundles after a branch run before the jump.
    assert routine.executed == 2 + 15 * 10 - skipped


HEAD = """HloModule hand
%sliced (p0: f32[64,128], p1: s32[]) -> f32[8,128] {
  %p0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[8,128]{1,0:T(8,128)} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={8,128}
}

ENTRY %main (x: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %row = f32[1,128]{1,0:T(1,128)S(1)} parameter(1)
  %rows = f32[64,128]{1,0:T(1,128)} parameter(2)
  %i = s32[]{:T(128)} parameter(3)
  %v = f32[8,128]{1,0:T(8,128)S(1)} parameter(4)
"""
WHOLE, SLICE = 64 * 128 * 4, 8 * 128 * 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[64,128]{1,0:T(8,128)} copy(%x)", 2 * WHOLE),
        ("f32[64,128]{1,0:T(8,128)} bitcast(%x)", 0),
        ("f32[8,128]{1,0:T(8,128)S(1)} fusion(%x, %i), kind=kLoop, calls=%sliced", SLICE),
        ("f32[64,128]{1,0:T(1,128)} dynamic-update-slice(%rows, %row, %i, %i)", 512),
        ("(f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)", WHOLE),
        (
            '(f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) custom-call(%x, %v), custom_call_target="k", '
            "output_to_operand_aliasing={{1}: (0, {})}, metadata={}",
            WHOLE + SLICE,
        ),
    ],
)
def test_bytes_to_and_from_hbm(line, expected):
    module = hlo.parse(f"{HEAD}  ROOT %out = {line}\n}}\n")
    entry = module.computations["main"]
    assert moved_bytes(module, entry, entry.root) == expected


@pytest.mark.slow
def test_a_fresh_dump_is_read(tmp_path):
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'mars-jax[test]' on Linux x86-64")
    compile_step = importlib.import_module("scripts.tpu_schedule.compile_step")
    case = compile_step.Case("none", "v5e:2x2", model="llama-3.2-1b", layers=2, context=256)
    cost = compile_step.measure(case, tmp_path)
    assert {"target/attention", "target/mlp", "target/unembed", "verify"} <= set(cost.parts)
    # Two all-reduces per layer.
    assert sum(cost.parts[f"target/{name}"].collectives for name in ("attention", "mlp")) == 4
    assert cost.high_seconds > cost.low_seconds > cost.bytes_seconds > 0
