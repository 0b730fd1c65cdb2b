"""Final schedules are read as libtpu writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mars_jax.lab.planning import bundles

TINY = Path(__file__).parent / "data" / "tiny_loop"


@pytest.fixture(scope="module")
def schedule():
    return bundles.read(TINY)


def test_a_folder_gives_the_top_level_and_its_routines(schedule):
    assert {"fusion.8", "sort.18", "all-reduce.4", "convert_reduce_fusion.2"} <= set(schedule.routines)
    assert len(schedule.routines["sort.18"].bundles) == 4507
    called = [name for name, _ in schedule.top.calls()]
    assert called.count("fusion.8") == 1 and called[-1] == ""
    assert sum(count for _, count in schedule.top.calls()) == len(schedule.top.bundles)


def test_a_grid_loop_is_multiplied_out(schedule):
    routine = schedule.routines["convert_reduce_fusion.2"]
    assert routine.loops == [bundles.Loop(first=12, last=576, trips=3)]
    assert routine.executed == len(routine.bundles) + 2 * 565


def test_the_loop_of_the_program_is_open_and_counted_once(schedule):
    # The outer loop, and the one over blocks.
    assert sum(loop.trips is None for loop in schedule.top.loops) >= 2


LOOPS = """
     0   :  {{ %s1_s0 = smov {first}  ;;  %s2_s1 = smov (!%p9_p3), 4 }} /* Start region 1 */
   0x1 LB: > {{ %s3_s2 = sphi %s1_s0, %s4_s0 }} /* Start region 7 */
   0x2   : > {{ %s4_s0 = sadd.s32 {step}, %s3_s2  ;;  %s7_s7 = sadd.s32 2, %s2_s1 }}
   0x3   : > {{ %p5_p0 = scmp.ge.s32.totalorder %s4_s0, {bound} /* loop exit test */ }}
   0x4   : > {{ %8 = sbr.rel (!%p5_p0) target = $region7 }}
   0x5   :  {{}}
   0x6   :  {{}}
   0x7   :  {{}}
   0x8   :  {{}} /* End region 7 */
   0x9   :  {{ %10 = sbr.rel (%p6_p1) target = $region9 }}
   0xa   :  {{ %9 = vtrace 1 }} /* Start region 9 */
"""


@pytest.mark.parametrize(
    ("first", "step", "bound", "trips"),
    [
        (0, 1, "10", 10),
        (2, 1, "10", 8),
        (0, 64, "4096", 64),
        (0, 64, "4097", 65),
        (0, 1, "%s2_s1", 4),  # of the smaller of 4 and something else: 4
        (0, 1, "%s7_s7", 4),  # two more turns that only fill the pipeline
        (0, 1, "%s99_s0", None),
    ],
)
def test_trip_counts_of_loops_to_a_constant(first, step, bound, trips):
    routine = bundles.parse(LOOPS.format(first=first, step=step, bound=bound))
    assert routine.loops == [bundles.Loop(1, 8, trips)]
    assert routine.executed == 3 + 8 * (trips or 1)


def test_a_comment_over_several_lines_belongs_to_its_bundle():
    routine = bundles.parse(
        "     0   :  { %1 = dma.hbm_to_vmem /* \nbase_bounds: (1, 4097)\n */ }\n   0x1   :  { %2 = vtrace 1 }\n"
    )
    assert len(routine.bundles) == 2


def test_a_folder_without_schedules_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        bundles.read(tmp_path)
