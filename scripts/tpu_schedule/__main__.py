"""What a decode step costs on a TPU, by the schedule of libtpu's compiler. No TPU is needed.

    python -m scripts.tpu_schedule tree chain-5 none        # a minute or more each
    python -m scripts.tpu_schedule tree --model llama-3.3-70b --topology v5p:2x2x1 --json tree.json
    python -m scripts.tpu_schedule --overheads              # the table from which `plan` estimates
    python -m scripts.tpu_schedule --accuracy               # the estimates of `plan` against recorded schedules

docs/tpu.md, "What a step costs", explains the columns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.lab.provenance import provenance
from scripts.tpu_schedule import overheads
from scripts.tpu_schedule.compile_step import Case, measure
from scripts.tpu_schedule.step import StepCost


def show(name: str, cost: StepCost) -> None:
    """Print a table of the parts of a step."""
    table = Table("part", "ms", "launches", "GB", "kilobundles", "collectives", title=name)
    for part in sorted(cost.parts, key=lambda part: -cost.seconds[part]):
        row = cost.parts[part]
        table.add_row(
            part,
            f"{1e3 * cost.seconds[part]:.3f}",
            str(row.launches),
            f"{row.bytes / 1e9:.3f}",
            f"{row.bundles / 1e3:.0f}",
            str(row.collectives),
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(
        f"{1e3 * cost.low_seconds:.2f} .. {1e3 * cost.high_seconds:.2f} ms, of which bytes take "
        f"{1e3 * cost.bytes_seconds:.2f} ms; {cost.launches} launches."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.tpu_schedule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "drafts", nargs="*", help="none, tree (EAGLE-3, 60 nodes), chain-K (EAGLE-3) or ngram-K"
    )
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(CONFIGS))
    parser.add_argument("--layers", type=int, help="default: all of the model's")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="slots of a row")
    parser.add_argument("--live", type=int, help="occupied slots of a row (default: all)")
    parser.add_argument(
        "--folder", type=Path, help="keep the dumps here, and reuse those that are here already"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--overheads",
        nargs="*",
        metavar="CHIP-DTYPE",
        help="rows to measure, such as v5e-int8 (default: all)",
    )
    parser.add_argument("--accuracy", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    costs = {}
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as scratch:
        folder = args.folder or Path(scratch)
        for draft in args.drafts:
            case = Case(
                draft=draft,
                topology=args.topology,
                dtype=args.dtype,
                model=args.model,
                layers=args.layers,
                batch=args.batch,
                context=args.context,
            )
            costs[draft] = measure(case, folder / draft, args.live)
            show(f"{draft}, {args.model}, {args.dtype}, {args.topology}", costs[draft])
        if args.overheads is not None:
            overheads.write_table(folder, args.overheads)
    if args.accuracy:
        overheads.write_accuracy()
    if args.json:
        parts = {
            draft: {name: vars(part) for name, part in cost.parts.items()} for draft, cost in costs.items()
        }
        cases = {draft: cost._asdict() | {"parts": parts[draft]} for draft, cost in costs.items()}
        report = provenance("jaxlib", "libtpu") | {"cases": cases}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
