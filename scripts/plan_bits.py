"""A published model in 8 and in 4 bits on one chip, by `mars-jax plan`: what fits, and what a step takes.

    python scripts/plan_bits.py --output scripts/results/plan_bits.json    # twelve plans of full depth: half an hour

Llama-3.1-8B with an EAGLE-3 head of the published shape in bfloat16, one row, 8,192 tokens. No TPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import common

from mars_jax.lab.commands import plan
from mars_jax.models import quantize

DRAFTS = {"chain of 5": ["--num-draft-tokens", "5"], "tree of 60": ["--tree", "dynamic:10-7-60"]}
KEPT = ("fits", "held_bytes", "hbm_bytes", "floor_seconds", "autoregressive_floor_seconds")
STEPS = ("step", "autoregressive_step")
TIMES = ("low_seconds", "high_seconds", "in_order_seconds")


WEIGHTS = {"int4": quantize.GROUPS, "int4 in groups of 32": (32,), "int8": quantize.GROUPS}
"""Dtypes, and the sizes of groups that 4 bits have: 128 where rows divide, and those of GGUF's files."""


def planned(chip: str, weights: str, flags: list[str]) -> dict[str, Any]:
    """The plan of a draft, without its parts."""
    out = io.StringIO()
    dtype, quantize.GROUPS = weights.partition(" ")[0], WEIGHTS[weights]
    argv = ["--target", "llama-3.1-8b", "--draft", "eagle3", "--topology", f"{chip}:1x1", "--dtype", dtype]
    with contextlib.redirect_stdout(out):
        plan.main([*argv, "--context", "8192", *flags, "--json"])
    made = json.loads(out.getvalue())
    return {name: made[name] for name in KEPT} | {
        name: made[name] and {time: made[name][time] for time in TIMES} for name in STEPS
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="gone on with where it exists")
    args = parser.parse_args()
    made = common.kept(args.output) or common.provenance() | {"results": {}}
    for chip in ("v5e", "v6e"):
        for weights in WEIGHTS:
            for draft, flags in DRAFTS.items():
                if (name := f"{chip}, {weights}, {draft}") not in made["results"]:
                    made["results"][name] = planned(chip, weights, flags)
                    print(name, made["results"][name], flush=True)
                    common.write(args.output, made)


if __name__ == "__main__":
    main()
