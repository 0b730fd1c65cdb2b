"""Print the cost of a decode step on a TPU according to the schedule of libtpu's compiler. No TPU is needed.

    python -m scripts.tpu_schedule tree chain-5 none        # a minute or more each
    python -m scripts.tpu_schedule tree --model llama-3.3-70b --topology v5p:2x2x1
    python -m scripts.tpu_schedule --overheads              # the table from which `plan` estimates

docs/tpu.md, "What a step costs", explains the columns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from mars_jax.lab.planning.outlined_models import CONFIGS
from scripts import common
from scripts.tpu_schedule import overheads
from scripts.tpu_schedule.compile_step import Case, measure
from scripts.tpu_schedule.step import StepCost


def show(name: str, cost: StepCost) -> None:
    """Print a table of the cost of each part of a step."""
    print(f"{name}\n{'part':<20}{'ms':>10}{'launches':>10}{'GB':>8}{'kilobundles':>13}{'collectives':>13}")
    for part in sorted(cost.parts, key=lambda part: -cost.seconds[part]):
        row = cost.parts[part]
        print(
            f"{part:<20}{1e3 * cost.seconds[part]:>10.3f}{row.launches:>10}{row.bytes / 1e9:>8.3f}"
            f"{row.bundles / 1e3:>13.0f}{row.collectives:>13}"
        )
    print(
        f"{1e3 * cost.low_seconds:.2f} .. {1e3 * cost.high_seconds:.2f} ms; reading the bytes takes "
        f"{1e3 * cost.bytes_seconds:.2f} ms; {cost.launches} launches."
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "drafts", nargs="*", help="none, tree (EAGLE-3, 60 nodes), chain-K (EAGLE-3) or ngram-K"
    )
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(CONFIGS))
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="slots of a row, all of them occupied")
    parser.add_argument("--folder", type=Path, help="keep the dumps here, and reuse existing ones")
    parser.add_argument(
        "--overheads",
        nargs="*",
        metavar="CHIP-DTYPE",
        help="rows to measure, such as v5e-int8 (default: all)",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as scratch:
        folder = args.folder or Path(scratch)
        for draft in args.drafts:
            case = Case(draft, args.topology, args.dtype, args.model, batch=args.batch, context=args.context)
            title = f"{draft}, {args.model}, {args.dtype}, {args.topology}"
            show(title, measure(case, folder / draft))
        if args.overheads is not None:
            overheads.write_table(folder, args.overheads)


if __name__ == "__main__":
    main()
