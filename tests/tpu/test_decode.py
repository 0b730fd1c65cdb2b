"""The whole decode loop compiles for real TPUs, on one chip and over four."""

import math
import re

import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from mars_jax.core.axes import parse_mesh
from mars_jax.lab.planning.chips import topology
from mars_jax.models.attention import KERNEL_ROWS
from tests.tpu import aot, decode_cases

PLACES = pytest.mark.parametrize(("generation", "chips"), [("v6e", 1), ("v5e", 4)])


@pytest.mark.slow
@PLACES
def test_the_autoregressive_loop_of_two_layers_compiles(generation, chips):
    report = decode_cases.compile_step(decode_cases.CASES[0], generation, chips, layers=2)
    assert report["hbm_share"] < 1
    assert bool(report["collectives"]) == (chips > 1)


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize("case", decode_cases.CASES[1:], ids=lambda case: case.name)
def test_the_loop_with_a_draft_of_two_layers_compiles(case, generation, chips):
    report = decode_cases.compile_step(case, generation, chips, layers=2)
    assert report["hbm_share"] < 1
    # The verifier runs one kernel, over four chips each on its part of the vocabulary. So does each level of a draft
    # that needs more than its likeliest token; over four chips a second kernel merges the parts. From 8 rows up, each
    # layer attends with a kernel: the target's layers, and the draft's for accepted tokens and for a level. At one row
    # only the target's layers do, if one chip has all heads, because XLA would process its tree serially.
    wide = sum(width > 1 for width in case.branching)
    in_turns = case.name == "tree" and chips == 1
    attending = 3 * 2 if case.batch >= KERNEL_ROWS else 2 * in_turns
    assert report["mosaic_kernels"] == 1 + wide * (2 if chips > 1 else 1) + attending


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "generation", "chips"), [("llama-3.1-8b", "v5e", 4), ("llama-3.3-70b", "v5p", 8)]
)
def test_the_loop_with_an_eagle_head_and_a_dynamic_tree_compiles(target, generation, chips):
    report = decode_cases.compile_eagle(target, generation, chips, layers=4)
    assert report["hbm_share"] < 1
    # One kernel for the verifier, two for the first level of the draft, and two in the loop over the other levels. The
    # first of each two selects tokens on each chip's part of the vocabulary; the second merges the parts.
    assert report["mosaic_kernels"] == 5
    # The chips exchange hidden states and a few numbers per node, but no vocabulary: at most the nodes of a tree times
    # the hidden size of a 70B model.
    travels = [shape for name in report["collectives"] for shape in re.findall(r"\[([\d,]+)\]", name)]
    assert 0 < max(math.prod(map(int, shape.split(","))) for shape in travels) <= 64 * 8192


@pytest.mark.slow
@pytest.mark.parametrize("tree", [decode_cases.TREE, None], ids=["tree", "chain"])
def test_a_loop_has_no_serial_gathers_large_sorts_or_copies(tree):
    """Check for rows in a loop, masks and caches in gathers of single elements, sorts of a vocabulary and large copies.

    Each of them once took most of a step.
    """
    batch, slots, levels = 5, 4096, 6 if tree else 4
    program, temporaries, embedding = decode_cases.eagle_loop(layers=2, batch=batch, tree=tree, slots=slots)
    instructions = aot.instructions(program)
    sorted_axes = [
        i.dims[int(re.search(r"dimensions=\{(\d+)\}", i.text)[1])] for i in instructions if i.opcode == "sort"
    ]
    assert max(sorted_axes, default=0) <= 1024
    single = [
        i.size
        for i in instructions
        if i.opcode == "gather" and set(re.search(r"slice_sizes=\{([\d,]*)\}", i.text)[1].split(",")) <= {"1"}
    ]
    assert max(single, default=0) < slots
    # Attention's loop over blocks of slots has no known trip count; the only loop with one is over the draft's levels.
    trip_counts = {int(n) for n in re.findall(r'"known_trip_count":\{"n":"(\d+)"', program)}
    assert trip_counts <= {levels}
    assert temporaries < embedding


@pytest.mark.slow
def test_a_prompt_is_passed_around_four_chips_and_read_by_the_kernel():
    """Each of two layers sends rows around before two products and sums after two: three hops, both ways."""
    program = decode_cases.prompt(4096)
    assert program.count(" collective-permute-start(") == 2 * 4 * 3 * 2
    # Each chip has two halves of rows that are not contiguous.
    assert len(re.findall(r"%tree_attention-\S* = ", program)) == 2 * 4 * 2


def test_neighbours_of_a_mesh_are_neighbours_on_the_slice():
    """The rows of a prompt travel around the mesh."""
    places = [chip.coords for chip in parse_mesh("model=4", topology("v5e:2x2").devices).devices]
    for place, neighbour in zip(places, places[1:] + places[:1], strict=True):
        assert sum(abs(a - b) for a, b in zip(place, neighbour, strict=True)) == 1
