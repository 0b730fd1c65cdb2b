"""A kernel's scalar program is carried out as the chip would: parts of some turns of its grid count in those alone."""

from __future__ import annotations

import pytest

from mars_jax.lab.planning import bundles, walk

KERNEL = """
     0   :  {{ %s1_s0 = smov 0 }} /* Start region 1 */
   0x1 LB: > {{ %s3_s2 = sphi %s1_s0, %s4_s0  ;;  %s4_s0 = sadd.s32 1, %s3_s2 }} /* Start region 7 */
   0x2   : > {{ %p5_p0 = scmp.{test}.s32.totalorder %s3_s2, {of}  ;;  %20 = sst [smem:[#allocation1_spill]] %s4_s0 }}
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
    ("test", "of", "predicate", "skipped"),
    [
        ("ne", "0", "%p5_p0", 9),  # what `pl.when(turn == 0)` makes
        ("ne", "0", "!%p5_p0", 1),
        ("lt", "7", "%p5_p0", 7),
        ("ne", "%s99_s9", "%p5_p0", 0),  # what is not known falls through
    ],
)
def test_a_part_counts_in_the_turns_in_which_it_runs(test, of, predicate, skipped):
    routine = bundles.parse(KERNEL.format(test=test, of=of, predicate=predicate))
    # A turn has 15 bundles, and skips that of its part alone: those after a branch run before it jumps.
    assert walk.executed(routine) == 2 + 15 * 10 - skipped
    assert routine.executed == 2 + 15 * 10


def test_a_loop_whose_end_was_read_runs_once():
    text = KERNEL.replace("%s9_s5, 10", "%s9_s5, %s77_s7").format(test="ne", of="0", predicate="%p5_p0")
    assert walk.executed(bundles.parse(text)) == 2 + 15


TABLE = """
     0   :  { %18 = dma.vmem_to_smem /*vmem=*/%s7_s1, 128, /*smem=*/[#allocation5], [#allocation10] }
   0x1   :  { %s1_s0 = smov 0  ;;  %s2_s1 = sld [smem:[#allocation5 + $0x81]] }
   0x2 LB: > { %s3_s2 = sphi %s1_s0, %s4_s0  ;;  %s4_s0 = sadd.s32 1, %s3_s2 } /* Start region 7 */
   0x3   : > { %p8_p1 = scmp.ge.s32.totalorder %s4_s0, %s2_s1 /* loop exit test */ }
   0x4   : > { %10 = sbr.rel (!%p8_p1) target = $region7 }
   0x5   : > {}
   0x6   : > {}
   0x7   : > {}
   0x8   : > {} /* End region 7 */
"""


def test_a_loop_runs_as_often_as_a_table_that_is_given_says():
    routine = bundles.parse(TABLE)
    assert walk.executed(routine) == 2 + 7
    # The second number of the second row: rows are as far apart as a TPU has lanes.
    assert walk.executed(routine, [[9, 9], [9, 4]]) == 2 + 4 * 7
