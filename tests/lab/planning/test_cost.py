"""A step is added up: parts, turns, branches, collectives, and the milliseconds that follow."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.mosaic.tree_attention import tile_table
from mars_jax.core.errors import MarsError
from mars_jax.lab.planning import bundles, hlo
from mars_jax.lab.planning.attention_kernel import attention_table, read_by_blocks
from mars_jax.lab.planning.constants import HOP_SECONDS, OP_SECONDS, SPEEDS, collective_seconds
from mars_jax.lab.planning.cost import Loop, Op, Step, Wait, read_step
from mars_jax.lab.planning.estimate import estimate, figures
from mars_jax.lab.planning.in_order import seconds_in_order
from mars_jax.lab.planning.parts import part
from mars_jax.lab.planning.traffic import Traffic, traffic

TINY = Path(__file__).parent / "data" / "tiny_loop"
SPEED = SPEEDS["v5e"]


@pytest.fixture(scope="module")
def step():
    module, schedule = hlo.parse((TINY / "hlo.txt").read_text()), bundles.read(TINY)
    return read_step(module, schedule, live=1024)


LONG = next(TINY.glob("*-TLP-01-*")).read_text().replace("= inlined_call %", "= call %")
"""The top level as libtpu writes it in programs that are too long to be inlined."""


def read_top(text, routines=None):
    module, schedule = hlo.parse((TINY / "hlo.txt").read_text()), bundles.read(TINY)
    chosen = schedule.routines if routines is None else routines
    return read_step(module, bundles.Schedule(bundles.parse(text), chosen), live=1024)


def test_a_call_is_read_as_one_that_is_inlined(step):
    assert LONG.count("= call %") > 10 and read_top(LONG) == step


@pytest.mark.parametrize(
    ("text", "routines", "said"),
    [
        (LONG.replace("= call %", "= jump %"), None, r"\S+ makes an array and is not called"),
        (LONG.replace("= fusion(", " fusion("), None, "a call names no instruction"),
        (LONG, {}, r"\S+ is called and has no routine"),
    ],
)
def test_what_cannot_be_placed_is_an_error_and_no_smaller_number(text, routines, said):
    with pytest.raises(MarsError, match=f"cannot be read whole, since {said}.*: use the libtpu"):
        read_top(text, routines)


def named(step, name):
    return next(op for op in step.ops() if op.name == name)


def test_the_product_reads_its_quarter_of_the_weights_and_the_input(step):
    product = named(step, "fusion.8")
    assert product.part == "target/mlp" and product.times == 1 and product.bundles == 812
    assert product.traffic == (1024 * 1024 * 2 + 8 * 1024 * 2, 0)
    assert product.flops == 2 * 8 * 1024 * 1024


def test_the_block_of_the_cache_is_read_in_each_turn_and_the_row_is_written(step):
    block, row = named(step, "convert_reduce_fusion.2"), named(step, "bitcast_dynamic-update-slice_fusion.2")
    assert (block.part, block.times) == ("target/attention", 4)
    assert block.traffic == (256 * 8 * 1024 * 2, 0)
    assert row.traffic == (0, 8 * 1024 * 2)
    assert [(loop.turns, loop.known) for loop in step.loops()] == [(4, True)]


def test_collectives_and_sorts_have_their_sizes(step):
    reduce = named(step, "all-reduce.4")
    assert (reduce.received, reduce.devices, reduce.bundles) == (8 * 1024 * 2, 4, 0)
    assert named(step, "sort.18").sorted == 1024
    assert sum(op.devices > 0 for op in step.ops()) == 2


def test_figures_and_estimate_add_up(step):
    found = figures(step, SPEED, 819e9)
    assert found["sorts"] == {"1024 in verify": 1}
    total = estimate(found, SPEED, 819e9)
    ops = [op for op in step.ops() if not op.scalar]
    assert total["ops"] == sum(op.times for op in ops)
    assert total["bytes"] == sum(op.times * sum(op.traffic) for op in step.ops())
    assert total["high_seconds"] - total["low_seconds"] == pytest.approx(
        total["ops"] * (OP_SECONDS[1] - OP_SECONDS[0])
    )
    assert total["low_seconds"] > total["bytes_seconds"] > 0


BRANCHES = """HloModule branches
%small (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %one = f32[8,128]{1,0:T(8,128)S(1)} negate(%a), metadata={op_name="jit(f)/verify/neg"}
}

%large (b: f32[8,128]) -> f32[8,128] {
  %b = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %two = f32[8,128]{1,0:T(8,128)S(1)} sine(%b), metadata={op_name="jit(f)/verify/sin"}
}

ENTRY %main (p: s32[], x: f32[8,128]) -> f32[8,128] {
  %p = s32[] parameter(0)
  %x = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %c = f32[8,128]{1,0:T(8,128)S(1)} conditional(%p, %x, %x), branch_computations={%large, %small}
}
"""


@pytest.mark.parametrize(("branches", "expected"), [("cheap", ["one"]), ("dear", ["two"])])
def test_of_a_conditional_the_asked_branch_is_counted(branches, expected):
    def calls(names):
        return bundles.Routine(
            [f"{{ %1 = inlined_call %s0 /* %{name} = negate(%a) */ }}" for name in names], []
        )

    routines = {"one": bundles.Routine(["{}"] * 3, []), "two": bundles.Routine(["{}"] * 30, [])}
    schedule = bundles.Schedule(calls(["one", "two"]), routines)
    step = read_step(hlo.parse(BRANCHES), schedule, live=0, branches=branches)
    assert [op.name for op in step.ops()] == expected


ASYNCHRONOUS = """HloModule pair
%started (x: f32[8,60]) -> (f32[8,60], f32[32,60]) {
  %x = f32[8,60]{1,0} parameter(0)
  %all-gather.1 = f32[32,60]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %custom-call.1 = (f32[8,60]{1,0}, f32[32,60]{1,0}) custom-call(%all-gather.1), custom_call_target="Begin"
}
%ended (y: f32[32,60]) -> f32[32,60] {
  %y = f32[32,60]{1,0} parameter(0)
  ROOT %custom-call.2 = f32[32,60]{1,0} custom-call(%y), custom_call_target="End"
}
ENTRY %main (x: f32[8,60]) -> f32[32,60] {
  %x = f32[8,60]{1,0} parameter(0)
  %async-collective-start = (f32[8,60]{1,0}, f32[32,60]{1,0}) fusion(%x), kind=kCustom, calls=%started
  %part = f32[32,60]{1,0} get-tuple-element(%async-collective-start), index=1
  ROOT %async-collective-done = f32[32,60]{1,0} fusion(%part), kind=kCustom, calls=%ended
}
"""


def test_a_collective_between_two_fusions_counts_once():
    step = read_step(hlo.parse(ASYNCHRONOUS), bundles.Schedule(bundles.Routine([], []), {}), live=1)
    (op,) = step.ops()
    assert (op.opcode, op.devices, op.sent, op.received) == ("all-gather", 4, 8 * 60 * 4, 32 * 60 * 4)


OFFLOADED = """
HloModule one, is_scheduled=true

%called (param: bf16[10,4096], token: token[]) -> bf16[10,4096] {
  %token = token[] parameter(1)
  %param = bf16[10,4096]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[10,4096]{1,0} all-reduce(%param), replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, to_apply=%add, metadata={op_name="jit(run)/while/body/target/mlp"}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[10,4096]) -> bf16[10,4096] {
  %x = bf16[10,4096]{1,0} parameter(0)
  %prepared = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %ready = token[] custom-call(%prepared), custom_call_target="PrepareAsyncCallDone"
  %all-reduce.1.cloned.1.call-start = ((bf16[10,4096]{1,0}, token[]), bf16[10,4096]{1,0}) call-start(%x, %ready), async_execution_thread="sparsecore", to_apply=%called
  ROOT %all-reduce.1.cloned.1.call-done = bf16[10,4096]{1,0} call-done(%all-reduce.1.cloned.1.call-start)
}
"""  # noqa: E501


def test_a_collective_of_the_sparse_cores_counts_once():
    """As libtpu writes them for tpu7x."""
    nothing = bundles.Schedule(bundles.Routine([], []), {})
    (op,) = [op for op in read_step(hlo.parse(OFFLOADED), nothing, live=1).ops() if not op.scalar]
    assert (op.opcode, op.devices, op.sent, op.part) == ("all-reduce", 8, 2 * 10 * 4096, "target/mlp")
    with pytest.raises(MarsError, match="call-start is no collective"):
        read_step(hlo.parse(OFFLOADED.replace("all-reduce(", "copy(")), nothing, live=1)


def an_op(name, *, opcode="fusion", moved=0, bundles=0, times=1, part="target/mlp", **sent):
    return Op(
        name=name, opcode=opcode, part=part, times=times, traffic=Traffic(moved, 0), bundles=bundles, flops=0,
        sorted=0, gathered=0, scalar=False, **{"sent": 0, "received": 0, "devices": 0, "way": ""} | sent,
    )  # fmt: skip


SLOW = SPEED._replace(clock=1e9)  # a bundle takes as long as a byte at 1e9 bytes a second


def nanoseconds(items):
    return round(1e9 * sum(seconds_in_order(Step(items, {}, 0), SLOW, 1e9)[0].values()))


def test_a_copy_that_was_started_ahead_uses_idle_bandwidth():
    ahead = an_op("c", opcode="copy-start", moved=100)
    computing, copying = an_op("a", bundles=70), an_op("b", moved=70)
    assert nanoseconds([ahead, computing, Wait("c")]) == 100
    assert nanoseconds([ahead, copying, Wait("c")]) == 170
    assert nanoseconds([ahead, computing, an_op("d", bundles=50), Wait("c")]) == 120


def test_a_loop_takes_its_turns_and_waits_for_what_it_starts_in_each():
    body = [an_op("c", opcode="copy-start", moved=10, times=4), an_op("a", bundles=4, times=4)]
    assert nanoseconds([Loop("w", 4, True, body)]) == 40
    # What was started before the loop is served by all its turns.
    outer = an_op("o", opcode="copy-start", moved=100)
    assert nanoseconds([outer, Loop("w", 4, True, [an_op("a", bundles=40, times=4)]), Wait("o")]) == 160


def test_what_is_sent_ahead_is_under_way_while_others_run():
    def sending(name, way, size):
        sent = {"sent": size, "received": size, "devices": 2, "way": way}
        return an_op(name, opcode="collective-permute-start", **sent)

    hop = round(1e9 * HOP_SECONDS)
    there, back = sending("t", "0 to 1", 300), sending("b", "1 to 0", 300)  # each takes a hop and 300 ns
    speed = SLOW._replace(link=2e9)

    def found(items):
        parts, waited = seconds_in_order(Step(items, {}, 0), speed, 1e9)
        return round(1e9 * sum(parts.values())), round(1e9 * sum(waited.values()))

    computing = an_op("a", bundles=hop + 100)
    assert found([there, computing, Wait("t")]) == (hop + 300, 200)
    # Two ways do not share a link, and what goes the same way comes one after the other.
    assert found([there, back, computing, Wait("t"), Wait("b")]) == (hop + 300, 200)
    again = sending("s", "0 to 1", 300)
    assert found([there, again, computing, Wait("s")]) == (2 * (hop + 300), hop + 500)
    assert found([there, an_op("a", bundles=2 * hop), Wait("t")]) == (2 * hop, 0)


def test_a_ring_that_passes_both_ways():
    assert collective_seconds("all-gather", 0, 0, 4, 90e9) == 2 * HOP_SECONDS
    assert collective_seconds("all-reduce", 0, 0, 8, 90e9) == 8 * HOP_SECONDS
    large = 90 * 10**6
    assert collective_seconds("all-reduce", large, large // 2, 4, 90e9) == pytest.approx(4e-6 + 1.5 * 0.75e-3)
    assert collective_seconds("reduce-scatter", large, large // 4, 4, 90e9) == pytest.approx(2e-6 + 0.75e-3)
    assert collective_seconds("all-reduce", 1 << 20, 1 << 20, 1, 90e9) == 0


@pytest.mark.parametrize(
    ("name", "functions", "expected"),
    [
        ("jit(run)/while/body/update/attention/cond/branch_0_fun/while", (), "update/attention"),
        ("jit(run)/while/body/verify/cond/vmap(jit(take))/gather", (), "verify"),
        ("", ("grow.py:_mask", "mars_jax/drafters/eagle.py:_eagle.<locals>.propose"), "draft/mask"),
        ("", ("mars_jax/tree.py:attention_mask", "mars_jax/decode.py:step"), "target/mask"),
        ("", ("mars_jax/verify/mars.py:__call__",), "verify"),
        ("", ("mars_jax/decode.py:step",), None),
    ],
)
def test_parts_by_scope_and_by_function(name, functions, expected):
    assert part(name, functions) == expected


KERNEL = """HloModule a

ENTRY %main (t: s32[4,4]) -> bf16[2,2,2,512,128] {
  %t = s32[4,4]{1,0} parameter(0)
  %q = bf16[2,2,2,512,128]{4,3,2,1,0} parameter(1)
  %n = s32[2,2,512,WORDS]{3,2,1,0} parameter(2)
  %k = bf16[2,640,2,128]{3,2,1,0} parameter(3)
  %v = bf16[2,640,2,128]{3,2,1,0} parameter(4)
  ROOT %tree_attention-bq128-bkv64.3 = bf16[2,2,2,512,128]{4,3,2,1,0} custom-call(%t, %q, %n, %k, %v), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


@pytest.mark.parametrize("words", [2, 4])
def test_attentions_kernel_has_the_table_that_it_is_given_and_reads_its_blocks(words):
    """Two rows of two tiles of 128 queries: in a row, or a tree's, whose tiles all see the same."""
    module = hlo.parse(KERNEL.replace("WORDS", str(words)))
    inside = module.computations[module.entry]
    call = inside.root
    operands = [inside.instructions[name] for name in call.operands]
    found = attention_table(call, operands, 300)
    of_tile = [
        tile_table(jnp.full((2,), end - 128), 128, None, slots=640, size=64, align=1)
        for end in ((172, 300) if words == 2 else (300, 300))
    ]
    np.testing.assert_array_equal(found[:4], jnp.stack(of_tile, axis=2).reshape(4, 4))
    assert len(found) == 5
    moved = read_by_blocks(call, operands, traffic(module, inside, call), found)
    blocks = 2 * (3 + 5) if words == 2 else 2 * (5 + 5)
    others = sum(x.shapes[0].bytes for x in operands[:3])
    assert moved.read == others + blocks * 64 * 2 * 128 * 2 * 2
    assert attention_table(inside.instructions["k"], [], 300) == []
