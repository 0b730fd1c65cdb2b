"""HLO texts are read as libtpu writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mars_jax.core.errors import MarsError
from mars_jax.lab.planning import hlo
from mars_jax.lab.planning.flops import flops
from mars_jax.lab.planning.hlo_loops import trips

TINY = Path(__file__).parent / "data" / "tiny_loop"


@pytest.fixture(scope="module")
def module():
    return hlo.parse((TINY / "hlo.txt").read_text())


def test_every_operand_is_an_instruction_of_the_same_computation(module):
    assert len(module.computations) > 10 and module.entry in module.computations
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            assert set(instruction.operands) <= set(computation.instructions), instruction.name
            assert set(instruction.calls) <= set(module.computations), instruction.name


def test_every_line_of_an_instruction_is_parsed(module):
    lines = [
        line
        for line in (TINY / "hlo.txt").read_text().splitlines()
        if line.startswith("  ") and " = " in line
    ]
    assert len(list(module.instructions)) == len(lines)


def test_a_line_that_is_no_instruction_is_an_error():
    with pytest.raises(MarsError, match=r"no instruction \(something new\)"):
        hlo.parse("ENTRY %main () -> f32[] {\n  something new\n}\n")


def test_shapes_have_their_layout_padding_and_memory_space():
    small, packed, scalar = hlo.shapes(
        "(bf16[1,4097,2,128]{3,2,1,0:T(2,128)(2,1)}, pred[3,200]{1,0:T(8,128)(4,1)S(1)}, f32[]{:T(128)S(6)})"
    )
    assert small.bytes == small.payload == 4097 * 2 * 128 * 2
    assert (packed.bytes, packed.payload, packed.space) == (8 * 256, 600, 1)
    assert (scalar.bytes, scalar.space) == (4, 6)


def test_a_layout_says_which_dimensions_the_tile_pads():
    transposed = next(hlo.shapes("f32[100,8]{0,1:T(8,128)}"))
    assert transposed.bytes == 8 * 128 * 4


def test_a_frame_gives_its_functions_innermost_first(module):
    product = next(i for i in module.instructions if i.opcode == "convolution")
    functions = module.functions[product.frame]
    assert [function.rpartition(":")[2] for function in functions[:2]] == ["run.<locals>.body", "run"]
    assert product.op_name.startswith("jit(run)/while/body/target/layer0/mlp/")


def test_the_loop_over_blocks_of_a_cache_turns_as_often_as_there_are_live_blocks(module):
    found = [
        (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
    ]
    inner = [pair for pair in found if pair[0].name != module.entry]
    assert len(found) == 2 and len(inner) == 1
    assert [trips(module, *inner[0], live=live) for live in (1, 256, 257, 1024, 10**6)] == [1, 1, 2, 4, 8]


COUNTED = """HloModule counted
%cond (carry: (s32[], s32[])) -> pred[] {
  %carry = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %n = s32[] get-tuple-element(%carry), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (carry.1: (s32[], s32[])) -> (s32[], s32[]) {
  %carry.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %n.1 = s32[] get-tuple-element(%carry.1), index=1
  %one = s32[] constant(1)
  %add = s32[] add(%i.1, %one)
  ROOT %next = (s32[], s32[]) tuple(%add, %n.1)
}

ENTRY %main (p: s32[]) -> (s32[], s32[]) {
  %p = s32[] parameter(0)
  %first = s32[] constant(1)
  %last = s32[] constant(7)
  %init = (s32[], s32[]) tuple(%first, START)
  ROOT %while = (s32[], s32[]) while(%init), condition=%cond, body=%bodyNOTED
}
"""


@pytest.mark.parametrize(
    ("start", "noted", "expected"),
    [
        ("%last", "", 6),
        ("%p", "", None),
        ("%p", ', backend_config={"known_trip_count":{"n":"5"}}', 5),
    ],
)
def test_a_counter_to_a_constant_and_the_compilers_note_give_the_turns(start, noted, expected):
    module = hlo.parse(COUNTED.replace("START", start).replace("NOTED", noted))
    entry = module.computations["main"]
    assert trips(module, entry, entry.root, live=0) == expected


@pytest.mark.parametrize(
    ("left", "right", "made", "window", "labels", "products"),
    [
        # Of a query product, by heads, as a v5p's compiler writes it; and of attention, a batch of two heads.
        (
            "60,32,1",
            "16,128,32",
            "60,16,128",
            "size=16 pad=15_15 rhs_reversal=1",
            "bf0_0oi->b0f",
            60 * 16 * 128 * 32,
        ),
        (
            "2,8,128",
            "96,2,128",
            "2,8,96",
            "size=2 stride=1 pad=0_0 lhs_dilate=2",
            "0bf_o0i->0bf",
            2 * 8 * 96 * 128,
        ),
        ("8,7,16", "3,64,16", "8,7,64", "size=3 pad=1_1", "b0f_0oi->b0f", 8 * (3 * 7 - 2) * 64 * 16),
    ],
)
def test_products_with_padding_and_gaps_are_none(left, right, made, window, labels, products):
    module = hlo.parse(f"""HloModule tiny
ENTRY %main (x: f32[{left}], w: f32[{right}]) -> f32[{made}] {{
  %x = f32[{left}] parameter(0)
  %w = f32[{right}] parameter(1)
  ROOT %c = f32[{made}] convolution(%x, %w), window={{{window}}}, dim_labels={labels}
}}
""")
    main = module.computations["main"]
    assert flops(module, main, main.root) == 2 * products
