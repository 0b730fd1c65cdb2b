"""The table of the MARS paper as a recipe: plan every row, run one on its slice, set the result beside the paper's.

    python scripts/paper/recipe.py plan --dry-run                     # the plans that were made, and the commands
    python scripts/paper/recipe.py plan --only qwen3-8b               # compile a row anew (extra: tpu)
    python scripts/paper/recipe.py run --row qwen3-8b --output paper  # on that row's slice
    python scripts/paper/recipe.py table --output paper               # whatever rows are there, beside the paper's

`run` is `mars-jax benchmark` at temperature 1 with the tree of the paper, on its six tasks, with all
controls: the target alone, `exact`, `mars` at theta = inf and 0.9, another margin at the same tau, and the target
sampling from the two best. After a kill the same command goes on. Nothing of it has run on a TPU yet: a plan says
what fits, and how long a step takes at least.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rows import CONTEXT, ROWS, TASKS, TEMPERATURE, THETA, TREE, Row

from mars_jax.lab.provenance import provenance, stamp

RESULTS = Path(__file__).resolve().parents[1] / "results"
PLANS, OTHERS = RESULTS / "paper_plans.json", RESULTS / "plans.json"
SHAPE = f"{TREE.top_k}-{TREE.depth}-{TREE.nodes}"
OTHER_SHAPE = "10-7-60"
"""The tree of plans.json: as many nodes, one level less to draft."""
PROBLEMS, NEW_TOKENS = 80, 1024


def flags(
    row: Row,
    output: Path,
    *,
    data: Path | None = None,
    tasks: Sequence[str] = tuple(TASKS),
    problems: int = PROBLEMS,
    new_tokens: int = NEW_TOKENS,
    tree: str = f"dynamic:{SHAPE}",
    allow_code_execution: bool = False,
) -> list[str]:
    """The flags of `mars-jax benchmark` for a row.

    Args:
      row: of the table.
      output: the folder of all rows.
      data: folder of the question sets; None takes them from the Hub.
      tasks, problems, new_tokens, tree: as in the paper unless a smaller run is wanted.
      allow_code_execution: run what the target writes for HumanEval, whose own layout on the Hub has tests.
    """
    given = ["--target", str(output / row.name / "target") if row.template else row.target]
    given += ["--draft", f"eagle:{row.head}", "--tree", tree, "--chat"]
    for name in tasks:
        given += ["--task", f"{name}={TASKS[name].hub if data is None else data / TASKS[name].file}"]
    given += ["--temperatures", f"{TEMPERATURE:g}", "--thetas", f"{THETA:g}", "--controls", "all"]
    given += ["--problems", str(problems)]
    given += ["--max-new-tokens", str(new_tokens), "--output", str(output / row.name / "run")]
    for flag, value in (("--mesh", row.mesh), ("--dtype", row.dtype)):
        given += [flag, value] if value else []
    return given + ["--allow-code-execution"] * allow_code_execution


def with_template(row: Row, output: Path) -> None:
    """A folder of links to the target's files, with the row's chat template beside them."""
    from mars_jax.hub.files import resolve

    assert row.template is not None
    source, made = resolve(row.target), output / row.name / "target"
    made.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = made / file.name
        if not link.exists() and file.name != "chat_template.jinja":
            link.symlink_to(file.resolve())
    (made / "chat_template.jinja").write_text(row.template, encoding="utf-8")


def run(row: Row, output: Path, **options: Any) -> int:
    """Measure a row; the exit code of the benchmark."""
    from mars_jax.lab.commands.benchmark import main as benchmark

    if row.template:
        with_template(row, output)
    return benchmark(flags(row, output, **options))


def measured(folder: Path) -> dict[str, float] | None:
    """Means over the tasks of a finished run, as the paper has them; None where there is none."""
    path = folder / "run" / "summary.json"
    if not path.exists():
        return None
    found: dict[str, list[float]] = {}
    for part in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        arms = {arm["role"]: arm for arm in part["arms"]}
        for role in ("strict", "rule"):
            found.setdefault(f"{role} speed", []).append(arms[role]["speedup"])
            found.setdefault(f"{role} tau", []).append(arms[role]["tau"])
        if arms["rule"]["recovered"] is not None:
            found.setdefault("recovered", []).append(arms["rule"]["recovered"])
    return {name: fmean(values) for name, values in found.items()}


def table(output: Path, rows: Sequence[Row] = ROWS) -> str:
    """The paper's table in Markdown: published, and measured where the row has run."""
    lines = [
        "| target | speed, published | measured | tau, published | measured | score recovered |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, (speed, tau) = measured(output / row.name), row.published
        cells = [row.target, _arrow(speed, "x"), "not run", _arrow(tau), "not run", ""]
        if ours is not None:
            cells[2] = _arrow((ours["strict speed"], ours["rule speed"]), "x")
            cells[4] = _arrow((ours["strict tau"], ours["rule tau"]))
            cells[5] = f"{ours['recovered']:.1%}" if "recovered" in ours else "not scored"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arrow(pair: tuple[float, float], unit: str = "") -> str:
    return f"{pair[0]:.2f}{unit} -> {pair[1]:.2f}{unit}"


def planned(row: Row) -> dict[str, Any]:
    """The plan of a row, from the TPU's compiler; minutes."""
    from mars_jax import verify
    from mars_jax.lab import planning
    from mars_jax.lab.planning.chips import topology
    from mars_jax.lab.planning.fit import draft_of
    from mars_jax.lab.planning.outlined_models import CONFIGS
    from mars_jax.models.eagle_head import EagleConfig
    from mars_jax.placement.shardings import parse_mesh

    target, slice_, dtype = CONFIGS[row.name], topology(row.slice_), row.dtype or "bfloat16"
    made = planning.make_plan(
        target,
        draft_of(EagleConfig.outline(target), tree=TREE, dtype=dtype),
        slice_,
        mesh=parse_mesh(row.mesh or "model=1", slice_.devices),
        verify=verify.mars(theta=THETA),
        context=CONTEXT,
        dtype=dtype,
    )
    return made.as_json()


def plans() -> dict[str, Any]:
    """The plan of every row that has one: for its own tree, else that of plans.json on the same slice."""
    own = json.loads(PLANS.read_text())["rows"] if PLANS.exists() else {}
    others = json.loads(OTHERS.read_text())["entries"]
    found = {}
    for row in ROWS:
        other = others.get(f"{row.name} {row.slice_} {row.dtype}")
        if row.name in own:
            found[row.name] = own[row.name] | {"tree": SHAPE}
        elif other is not None:
            found[row.name] = other | {"tree": OTHER_SHAPE}
    return found


def plan_table(plans: dict[str, Any], rows: Sequence[Row] = ROWS) -> str:
    """What each row needs, in Markdown."""
    lines = [
        "| target | head | slice | mesh | tree | fits | GiB of a chip | a step at least, ms | without a draft, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plan = plans.get(row.name)
        cells = [row.target, row.head, row.slice_, row.mesh or "", "not planned", "", "", "", ""]
        if plan is not None:
            cells[4:6] = plan["tree"], "yes" if plan["fits"] else "no"
            cells[6] = f"{plan['held_bytes'] / 2**30:.1f} of {plan['hbm_bytes'] / 2**30:.0f}"
            cells[7] = f"{1e3 * plan['floor_seconds']:.1f}"
            cells[8] = f"{1e3 * plan['autoregressive_floor_seconds']:.1f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plan(args: argparse.Namespace) -> int:
    report = json.loads(PLANS.read_text()) if PLANS.exists() else {"rows": {}}
    for row in ROWS:
        if args.dry_run or args.only not in row.name or (row.name in report["rows"] and not args.only):
            continue
        report["rows"][row.name] = planned(row) | {"made": stamp()}
        report["environment"] = provenance("jaxlib", "libtpu")
        PLANS.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{row.name}: compiled in {report['rows'][row.name]['compile_seconds']:.0f} s", flush=True)
    print(plan_table(plans()))
    if args.dry_run:
        print("\non its slice, each row is one command, which runs:\n")
        for row in ROWS:
            print(shlex.join(["python", "-m", "mars_jax", "benchmark", *flags(row, args.output)]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("plan", help="compile rows for their slices, without a TPU")
    made.add_argument("--dry-run", action="store_true", help="compile nothing: show the plans that were made")
    made.add_argument("--only", default="", metavar="NAME", help="plan rows whose name contains this anew")
    made.add_argument(
        "--output", type=Path, default=Path("paper"), help="the folder of the rows (%(default)s)"
    )
    made = commands.add_parser("run", help="measure a row, on its slice")
    made.add_argument("--row", required=True, choices=[row.name for row in ROWS])
    made.add_argument("--output", type=Path, required=True, help="the folder of all rows")
    made.add_argument(
        "--data", type=Path, help="folder of mt_bench.jsonl.xz and the others (default: the Hub)"
    )
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    made.add_argument("--problems", type=int, default=PROBLEMS, help="of each task (%(default)s)")
    made.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of an answer (%(default)s)")
    made.add_argument(
        "--allow-code-execution", action="store_true", help="score HumanEval; as for the benchmark"
    )
    made = commands.add_parser("table", help="set what has run beside what was published")
    made.add_argument("--output", type=Path, required=True, help="the folder of all rows")
    args = parser.parse_args(argv)
    if args.command == "plan":
        return _plan(args)
    if args.command == "table":
        print(table(args.output))
        return 0
    row = next(row for row in ROWS if row.name == args.row)
    options = {name: getattr(args, name) for name in ("data", "tasks", "problems", "new_tokens")}
    options["allow_code_execution"] = args.allow_code_execution
    return run(row, args.output, **options)


if __name__ == "__main__":
    sys.exit(main())
