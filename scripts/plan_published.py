"""The speedups that published acceptance lengths would be on a TPU slice, by `mars-jax plan`.

    python scripts/plan_published.py --output scripts/results/plan_published.json    # five plans: half an hour

The recipes of the MARS paper's pairs have its taus and its speedups on H100s, with EAGLE-3 and with MARS. A plan gives
the time of a step with the paper's tree and of one without a draft: batch 1, 4,096 tokens, bfloat16. No TPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import common

from mars_jax.lab import recipes
from mars_jax.lab.commands import plan

PAIRS = ("llama-3.1-8b", "qwen3-8b", "vicuna-13b", "qwen3-32b", "llama-3.3-70b")


def planned(recipe: dict[str, Any]) -> dict[str, Any]:
    """The times of a step with the draft and without, in seconds from low to high."""
    out = io.StringIO()
    pair = ["--target", recipe["flags"]["target"], "--draft", "eagle3", "--dtype", recipe["flags"]["dtype"]]
    shape = [
        "--topology",
        recipe["slice"]["topology"],
        "--tree",
        recipe["paper"]["tree"],
        "--context",
        "4096",
    ]
    with contextlib.redirect_stdout(out):
        plan.main([*pair, *shape, "--verify", "mars", "--json"])
    made = json.loads(out.getvalue())
    steps = {"step": made["step"], "alone": made["autoregressive_step"]}
    return {name: [found["low_seconds"], found["high_seconds"]] for name, found in steps.items()} | {
        "fits": made["fits"],
        "topology": recipe["slice"]["topology"],
        "published": recipe["published"],
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="gone on with where it exists")
    args = parser.parse_args()
    made = common.kept(args.output) or common.provenance() | {"results": {}}
    for name in PAIRS:
        if name not in made["results"]:
            recipe = tomllib.loads((Path(recipes.__file__).parent / f"{name}.toml").read_text())
            made["results"][name] = planned(recipe)
            print(name, made["results"][name], flush=True)
            common.write(args.output, made)


if __name__ == "__main__":
    main()
