"""What a decode step costs on a TPU, by the schedule that libtpu's compiler makes; no TPU is needed.

    python scripts/tpu_cost.py --cases none chain-5 tree       # a minute or two each
    python scripts/tpu_cost.py --cases none --checkout OLD --label before
    python scripts/tpu_cost.py --from DIR --name tree          # a dump that was made before
    python scripts/tpu_cost.py --added DIR DIR --name chain-5  # what the second program adds
    python scripts/tpu_cost.py --picture                       # of what is in the JSON

Results are added to scripts/results/tpu_cost.json by label and case, and drawn into docs/tpu_cost.svg. How to
read them: docs/tpu.md, "What a step costs". Constants, frozen: mars_jax/lab/planning/constants.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

from mars_jax.lab.pictures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    no_grid,
    picture,
    whiskers,
)  # fmt: skip
from mars_jax.lab.planning import bundles, hlo
from mars_jax.lab.planning.chips import CHIPS
from mars_jax.lab.planning.constants import HOP_SECONDS, OP_SECONDS, SPEEDS
from mars_jax.lab.planning.cost import read_step
from mars_jax.lab.planning.estimate import estimate, figures

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "scripts" / "results" / "tpu_cost.json"
PARTS = {
    "target/mlp": BLUE,
    "target/attention": SKY,
    "target/unembed": GREEN,
    "draft": ORANGE,
    "mask": VERMILLION,
    "verify": PURPLE,
    "update": YELLOW,
    "the rest": GREY,
    "instructions": LIGHT,
}
"""Colours of the parts of a step's cost."""


def dump(arguments: Sequence[str], folder: Path, checkout: Path) -> None:
    """Run tpu_dump.py in a process of its own, on a checkout."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "LIBTPU_INIT_ARGS": bundles.LIBTPU_FLAGS.format(folder=folder),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, str(ROOT / "scripts" / "tpu_dump.py"), *arguments, str(folder)]
    subprocess.run(command, check=True, env=environment, cwd=checkout)


def read(folder: Path, generation: str, live: int, branches: str) -> dict[str, Any]:
    """The figures of a program from its folder."""
    module, schedule = hlo.parse((folder / "hlo.txt").read_text()), bundles.read(folder)
    step = read_step(module, schedule, live=live, branches=branches)  # pyright: ignore[reportArgumentType]
    return figures(step, SPEEDS[generation], CHIPS[generation].bandwidth)


def draft_ops(folder: Path, live: int) -> dict[str, float]:
    """Instructions of a level of the draft, where it is a loop, and of a block's tree."""
    module = hlo.parse((folder / "hlo.txt").read_text())
    scopes = {
        instruction.name: instruction.op_name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    step = read_step(module, bundles.read(folder), live=live)
    found = {"level": 0.0, "best_first": 0.0}
    turns = max((loop.turns for loop in step.loops()), default=1)
    for op in step.ops():
        if op.scalar or not op.part.startswith("draft"):
            continue
        if "best_first" in scopes.get(op.name, "").split("/"):
            found["best_first"] += op.times
        elif op.times > 1:
            found["level"] += op.times / turns
    return found


def case(folder: Path, generation: str, live: int, branches: str) -> dict[str, Any]:
    """Figures and estimate of a program from its folder; of a prompt, whose program is of a chunk, those of its last
    chunk, and the seconds of all."""

    def estimated(found: dict[str, Any]) -> dict[str, Any]:
        return estimate(found, SPEEDS[generation], CHIPS[generation].bandwidth)

    told = folder / "meta.json"
    compiled = json.loads(told.read_text()) if told.exists() else {}
    ends = [live]
    if chunk := compiled.get("chunk"):
        # Where devices pass rows around, each of its calls attends for another part: on average for one in the middle.
        part = chunk // compiled["parts"]
        ends = [min(end, live) - (chunk - part) // 2 for end in range(chunk, live + chunk, chunk)]
    found = [read(folder, generation, end, branches) for end in ends]
    estimates = [estimated(one) for one in found]
    made: dict[str, Any] = {
        "compiled": compiled,
        "branches": branches,
        "draft_ops": draft_ops(folder, live),
        "estimate": estimates[-1],
        "figures": found[-1],
    }
    if chunk:
        keys = ("low_seconds", "high_seconds", "in_order_seconds", "collective_seconds")
        flops = sum(part.get("flops", 0) for one in found for part in one["parts"].values())
        made["prompt"] = {
            **{key: sum(one[key] for one in estimates) for key in keys},
            "products_seconds": flops / SPEEDS[generation].peak_bf16,
        }
    return made


def added(
    folders: Sequence[Path], generation: str, live: int, branches: str, step_seconds: float
) -> dict[str, Any]:
    """What a program has that another of as many layers has not, in the parts that are no model's.

    Between two programs the compiler also moves weights to and from fast memory, which is no cost of what was added.

    Args:
      folders: dumps of the two.
      step_seconds: of a step of the whole model, by its low estimate.
    """
    few, more = (read(folder, generation, live, branches) for folder in folders)
    seconds = [estimate(found, SPEEDS[generation], CHIPS[generation].bandwidth) for found in (few, more)]
    parts = {}
    for name in sorted({*few["parts"], *more["parts"]}):
        if "/" not in name:
            ops = [found["parts"].get(name, {}).get("ops", 0) for found in (few, more)]
            own = [found["parts"].get(name, 0.0) for found in seconds]
            parts[name] = {"seconds": own[1] - own[0], "ops": ops[1] - ops[0]}
    total = sum(p["seconds"] + OP_SECONDS[0] * p["ops"] for p in parts.values())
    return {
        "parts": parts,
        "low_seconds": total,
        "share_of_step": total / step_seconds,
        "step_seconds": step_seconds,
        "whole_programs": [found["low_seconds"] for found in seconds],
        "gathers": [found["gathers"] for found in (few, more)],
        "compiled": [json.loads((folder / "meta.json").read_text()) for folder in folders],
    }


def show(name: str, found: Mapping[str, Any]) -> None:
    """The table of a case."""
    from rich.console import Console
    from rich.table import Table

    total, made = found["estimate"], found["figures"]
    table = Table("part", "ms", "in order", "ops", "GB", "kilobundles", "collectives", title=name)
    for part in sorted(total["parts"], key=lambda part: -total["parts"][part]):
        row = made["parts"][part]
        moved = row.get("read_bytes", 0) + row.get("written_bytes", 0)
        table.add_row(
            part,
            f"{1e3 * total['parts'][part]:.3f}",
            f"{1e3 * row.get('in_order_seconds', 0):.3f}",
            f"{row.get('ops', 0)}",
            f"{moved / 1e9:.3f}",
            f"{row.get('bundles', 0) / 1e3:.0f}",
            f"{row.get('collectives', 0)}",
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    low, high, least = total["low_seconds"], total["high_seconds"], total["bytes_seconds"]
    console.print(
        f"{1e3 * least:.2f} ms of bytes; estimate {1e3 * low:.2f} .. {1e3 * high:.2f} ms "
        f"({low / least:.2f} .. {high / least:.2f} of the bytes), in order {1e3 * total['in_order_seconds']:.2f} ms; "
        f"{total['ops']} ops, {total['scalars']} scalars, {total['collectives']} collectives, "
        f"sorts {sum(made['sorts'].values())}, gathers {sum(made['gathers'].values())}, loops {made['loops']}."
    )
    if prompt := found.get("prompt"):
        console.print(
            f"The prompt: {1e3 * prompt['low_seconds']:.1f} .. {1e3 * prompt['high_seconds']:.1f} ms in chunks of "
            f"{found['compiled']['chunk']}, in order {1e3 * prompt['in_order_seconds']:.1f} ms; its products alone "
            f"{1e3 * prompt['products_seconds']:.1f} ms at the peak."
        )


def bars(found: Mapping[str, Any]) -> dict[str, float]:
    """ms of the pieces of a case's bar."""
    pieces = dict.fromkeys(PARTS, 0.0)
    for part, seconds in found["estimate"]["parts"].items():
        phase, _, component = part.partition("/")
        key = next(
            (k for k in (part, "mask" if component == "mask" else "", phase) if k in pieces), "the rest"
        )
        pieces[key] += 1e3 * seconds
    pieces["instructions"] = 1e3 * OP_SECONDS[0] * found["estimate"]["ops"]
    return pieces


def draw(report: Mapping[str, Any], pictures: Sequence[Path]) -> None:
    """A bar for each label, in a panel for each case; the dot is all bytes over the bandwidth, the dash the schedule
    run in order, and the whisker goes up to 1.5 us an instruction."""
    labels = [label for label in report["cases"] if "from" not in label]
    labels.sort(key=lambda label: label != "before")
    names = list(dict.fromkeys(name for label in labels for name in report["cases"][label]))
    told = (
        f"{report['model']} in bfloat16, batch {report['batch']}, context {report['context']}, {report['topology']}: "
        f"no run, but estimates from the compiler's schedule; {report['date']}. Whiskers: 0.2 to 1.5 us an instruction."
    )
    grid = {"columns": len(names), "panel": (2.9, 3.4), "sharey": True}
    with picture(pictures, **grid, caption=told) as (row,):
        for axis, name in zip(row, names, strict=True):
            here = [
                (label, report["cases"][label][name]) for label in labels if name in report["cases"][label]
            ]
            bottoms = [0.0] * len(here)
            for piece, colour in PARTS.items():
                heights = [bars(found)[piece] for _, found in here]
                axis.bar(range(len(here)), heights, 0.6, bottom=bottoms, color=colour, label=piece)
                bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
            ends = [
                [1e3 * found["estimate"][f"{end}_seconds"] for end in ("low", "high")] for _, found in here
            ]
            axis.errorbar(
                range(len(here)),
                bottoms,
                yerr=whiskers(bottoms, ends),
                fmt="none",
                ecolor="#777777",
                elinewidth=0.9,
            )
            for mark, key, label in (("o", "bytes_seconds", "bytes"), ("_", "in_order_seconds", "in order")):
                heights = [1e3 * found["estimate"][key] for _, found in here]
                axis.plot(range(len(here)), heights, mark, color=BLACK, markersize=7, label=label)
            axis.set_xticks(range(len(here)), [label.replace(", ", ",\n") for label, _ in here])
            axis.set_title("no draft" if name == "none" else name)
            no_grid(axis, "x")
        row[0].set_ylabel("ms a step, estimated")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--cases", nargs="*", default=[], help="as tpu_dump.py takes them for --draft")
    parser.add_argument("--from", type=Path, dest="folder", metavar="DIR", help="a dump made before")
    parser.add_argument(
        "--added", nargs=2, type=Path, metavar="DIR", help="a dump, and one that has something more"
    )
    parser.add_argument("--name", default="none", help="the case that --from and --added are stored as")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="slots of a row")
    parser.add_argument("--live", type=int, help="slots of a row that hold something (default: all)")
    parser.add_argument("--attention", default="auto", help="of the target: auto, xla or pallas")
    parser.add_argument("--constraint", type=int, metavar="STATES", help="rows have one, of so many states")
    parser.add_argument("--branches", choices=("cheap", "dear"), default="cheap")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the mars_jax to compile")
    parser.add_argument("--label", default="now")
    parser.add_argument("--about", help="what the label stands for, such as a commit")
    parser.add_argument("--keep", type=Path, help="a folder for the dumps, which are removed else")
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--json", type=Path, default=REPORT)
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    asked = parse(argv)
    live = asked.live or asked.context
    generation = asked.topology.partition(":")[0]
    report: dict[str, Any] = {"cases": {}} | common.kept(asked.json)
    made: dict[str, Any] = {}
    if asked.folder:
        made[asked.name] = case(asked.folder, generation, live, asked.branches)
    if asked.added:
        whole = json.loads(REPORT.read_text())["cases"]["now"][asked.name]["estimate"]["low_seconds"]
        told = added(asked.added, generation, live, asked.branches, whole)
        print(
            json.dumps(
                {key: told[key] for key in ("parts", "low_seconds", "share_of_step", "whole_programs")}
            )
        )
        report.setdefault("added", {}).setdefault(asked.label, {})[asked.name] = told
    for name in asked.cases:
        with tempfile.TemporaryDirectory(prefix="mars-jax-tpu-cost-") as scratch:
            folder = (asked.keep or Path(scratch)) / name
            arguments = {
                "--model": asked.model, "--draft": name, "--topology": asked.topology, "--batch": asked.batch,
                "--context": asked.context, "--attention": asked.attention,
            }  # fmt: skip
            if asked.constraint is not None:
                arguments["--constraint"] = asked.constraint
            folder.mkdir(parents=True, exist_ok=True)
            flat = [str(word) for pair in arguments.items() for word in pair]
            dump(flat, folder.resolve(), asked.checkout.resolve())
            made[name] = case(folder, generation, live, asked.branches)
    for name, found in made.items():
        show(f"{name}, {asked.label}", found)
    if made:
        report |= {
            "model": asked.model,
            "topology": asked.topology,
            "batch": asked.batch,
            "context": asked.context,
            "environment": common.provenance("jaxlib", "libtpu"),
            "constants": {
                "speed": SPEEDS[generation]._asdict(),
                "bandwidth": CHIPS[generation].bandwidth,
                "hop_seconds": HOP_SECONDS,
                "op_seconds": OP_SECONDS,
            },
        }
        stamped = {name: found | {"made": common.stamp()} for name, found in made.items()}
        report["cases"].setdefault(asked.label, {}).update(stamped)
        if asked.about:
            report.setdefault("labels", {})[asked.label] = asked.about
    if made or asked.added:
        common.write(asked.json, report)
    if asked.picture:
        draw(report, [asked.pictures / "tpu_cost.svg"])


if __name__ == "__main__":
    main()
