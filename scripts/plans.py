"""Which TPU slice the models of the published results need: the table of docs/results.md, from the TPU's own compiler.

    python scripts/plans.py --output scripts/results/plans.json

Batch 1, contexts of 4,096 tokens, an EAGLE-3 head of the published shape with a dynamic tree of 60 nodes, `mars`.
Compiles for minutes each, without a TPU; entries that the JSON has already are kept, so that it can be continued.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from mars_jax import verify
from mars_jax.lab import planning
from mars_jax.lab.planning.chips import topology
from mars_jax.lab.planning.fit import default_mesh, draft_of
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.placement.shardings import parse_mesh
from mars_jax.specs import Dynamic

CASES = (
    ("llama-3.1-8b", "v5e:1x1", "int8"),
    ("llama-3.1-8b", "v5e:2x2", "bfloat16"),
    ("llama-3.1-8b", "v6e:1x1", "bfloat16"),
    ("qwen3-8b", "v5e:2x2", "bfloat16"),
    ("qwen3-8b", "v6e:1x1", "bfloat16"),
    ("vicuna-13b", "v5e:2x2", "bfloat16"),
    ("vicuna-13b", "v6e:1x1", "bfloat16"),
    ("vicuna-13b", "v5p:2x2x1", "bfloat16"),
    ("qwen3-32b", "v5e:2x4", "bfloat16"),
    ("qwen3-32b", "v6e:2x2", "bfloat16"),
    ("qwen3-32b", "v5p:2x2x1", "bfloat16"),
    ("llama-3.3-70b", "v5e:2x4", "int8"),
    ("llama-3.3-70b", "v5e:4x4", "bfloat16"),
    ("llama-3.3-70b", "v6e:2x4", "bfloat16"),
    ("llama-3.3-70b", "v5p:2x2x1", "bfloat16"),
    ("qwen3-235b-a22b", "v6e:4x4", "bfloat16"),
    ("qwen3-235b-a22b", "v5p:2x2x2", "bfloat16"),
    ("qwen3-235b-a22b", "v5e:4x8", "bfloat16"),
)
BATCH, CONTEXT = 1, 4096


def planned(name: str, where: str, dtype: str) -> dict[str, Any]:
    target, slice_ = CONFIGS[name], topology(where)
    axes = ",".join(f"{k}={v}" for k, v in default_mesh(target, len(slice_.devices), BATCH).items())
    made = planning.make_plan(
        target,
        draft_of(EagleConfig.outline(target), tree=Dynamic(), dtype=dtype),
        slice_,
        mesh=parse_mesh(axes, slice_.devices),
        verify=verify.mars(),
        batch=BATCH,
        context=CONTEXT,
        dtype=dtype,
    )
    return {
        "target": name,
        "draft": "eagle3",
        "batch": BATCH,
        "context": CONTEXT,
        "dtype": dtype,
        **made.as_json(),
    }


def table(entries: dict[str, dict[str, Any]]) -> str:
    """A Markdown table, in the order of `CASES`."""
    lines = [
        "| target | weights | slice | fits | GiB of a chip | a step takes at least, ms | without a draft, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        if (entry := entries.get(" ".join(case))) is None:
            continue
        used = f"{entry['held_bytes'] / 2**30:.1f}" if entry["held_bytes"] else "more"
        floor, alone = 1e3 * entry["floor_seconds"], 1e3 * entry["autoregressive_floor_seconds"]
        cells = (
            case[0], case[2], case[1], "yes" if entry["fits"] else "no",
            f"{used} of {entry['hbm_bytes'] / 2**30:.0f}", f"{floor:.1f}", f"{alone:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write, or to continue")
    parser.add_argument("--only", default="", help="entries whose name contains this, such as 'qwen3-8b v5e'")
    args = parser.parse_args()
    entries: dict[str, Any] = {}
    if args.output.exists():
        entries = json.loads(args.output.read_text())["entries"]
    for case in CASES:
        name = " ".join(case)
        if args.only not in name or name in entries:
            continue
        entries[name] = planned(*case)
        versions = {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "libtpu")}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"versions": versions, "entries": entries}, indent=1) + "\n")
        row = entries[name]
        print(
            f"{name}: {'fits' if row['fits'] else 'does not fit'}, compiled in {row['compile_seconds']} s",
            flush=True,
        )
    print(table(entries))


if __name__ == "__main__":
    main()
