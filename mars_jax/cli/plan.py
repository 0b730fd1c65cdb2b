"""`python -m mars_jax.plan`: which TPU slice a pair of models needs, without a TPU and without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__, specs
from mars_jax.cli.flags import number_of
from mars_jax.cli.program import Parser, command
from mars_jax.cli.progress import busy
from mars_jax.cli.rule import add_rule_flags, rule_of
from mars_jax.core.errors import MarsError

_DESCRIPTION = """\
Compile the decode loop of a pair of models ahead of time for a TPU slice, and say what it
holds on each chip, what travels between chips, what a step reads at least, how long that
takes at the chip's published bandwidth, and whether it fits. Needs libtpu, but no TPU.
"""
_EPILOG = """\
examples:
  python -m mars_jax.plan --target llama-3.1-8b --draft eagle3 --topology v5e:2x2
  python -m mars_jax.plan --target qwen3-235b-a22b --topology v5p:2x2x4 --batch 8 --json
  python -m mars_jax.plan --target path/to/config.json --draft model:llama-3.2-1b --topology v6e:1x1

A target is a name (vicuna-13b, llama-3.1-8b, llama-3.2-1b, llama-3.3-70b, qwen3-8b,
qwen3-32b, qwen3-235b-a22b), a config.json or a directory with one, or a name on the
Hugging Face hub, of which the config alone is read. Slices are named generation:shape,
such as v5e:4x4, v6e:2x4, v4:2x2x1 and v5p:2x2x2. Exit code 1: it does not fit.
"""
_DRAFTS = "eagle3, medusa, model:TARGET, ngram or none"


def parser() -> argparse.ArgumentParser:
    """The parser; numbers are still texts."""
    made = Parser(prog="python -m mars_jax.plan", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument("--target", required=True, metavar="NAME")
    made.add_argument(
        "--draft",
        default="eagle3",
        metavar="DRAFT",
        help=f"{_DRAFTS}; the heads have the published shapes for the target (default: %(default)s)",
    )
    made.add_argument("--tree", metavar="SHAPE", help="as for mars_jax.generate")
    made.add_argument("--num-draft-tokens", metavar="N", help="length of a chain (default: the drafter's)")
    add_rule_flags(made)
    made.add_argument("--topology", required=True, metavar="SLICE", help="such as v5e:4x4")
    made.add_argument(
        "--mesh",
        metavar="AXES",
        help="such as data=2,model=8 (default: as many chips as the key-value heads divide over for model, the "
        "others for data if the batch divides, else for model too)",
    )
    made.add_argument("--batch", default="1", metavar="N", help="rows (default: %(default)s)")
    made.add_argument(
        "--context",
        default="4096",
        metavar="N",
        help="tokens of a row, prompt and output (default: %(default)s)",
    )
    made.add_argument(
        "--dtype",
        choices=specs.DTYPES,
        default="bfloat16",
        help="of the weights; int8: the target's matrices in 8 bits (default: %(default)s)",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    fits = True

    def run(args: argparse.Namespace, out: IO[str]) -> None:
        nonlocal fits
        fits = _run(args, out)

    return command(lambda argv: parser().parse_args(argv), run, argv) or (0 if fits else 1)


def _run(args: argparse.Namespace, out: IO[str]) -> bool:
    batch, context = _number("batch", args.batch), _number("context", args.context)
    length = None if args.num_draft_tokens is None else number_of("num_draft_tokens", args.num_draft_tokens)
    tree: Any = None if args.tree is None else specs.parse_tree(args.tree)
    rule = rule_of(args, "mars")
    if needs := {"chain", "weights"} & rule.needs:
        raise MarsError(
            f"--verify {rule.name} needs {specs.NEEDS[min(needs)]}, which a plan has not: choose another rule."
        )

    # From here on jax loads; what is above answers at once.
    from mars_jax import planning, verify
    from mars_jax.placement.shardings import parse_mesh
    from mars_jax.planning import dump
    from mars_jax.planning.chips import topology
    from mars_jax.planning.fit import default_mesh, draft_of

    dump.dump_folder()  # before libtpu is loaded
    target = _config(args.target)
    where = topology(args.topology)
    axes = args.mesh or ",".join(
        f"{k}={v}" for k, v in default_mesh(target, len(where.devices), batch).items()
    )
    draft = draft_of(_draft(args.draft, target), num_draft_tokens=length, tree=tree, dtype=args.dtype)
    with busy("planning"):
        made = planning.make_plan(
            target,
            draft,
            where,
            mesh=parse_mesh(axes, where.devices),
            verify=verify.load(rule.spec, **rule.settings).rule,
            batch=batch,
            context=context,
            dtype=args.dtype,
        )
    asked = {
        "target": args.target,
        "draft": args.draft,
        "batch": batch,
        "context": context,
        "dtype": args.dtype,
    }
    if args.json:
        print(json.dumps(asked | made.as_json()), file=out)
    else:
        _print(asked, made, out)
    return made.fits


def _number(name: str, text: str) -> int:
    # Python converts no text of more than 4,300 digits.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= 2**20):
        raise MarsError(f"--{name} is {text}: expected a whole number from 1 to {2**20}.")
    return int(text)


def _config(name: str) -> Any:
    from mars_jax import hub
    from mars_jax.planning.models import CONFIGS

    if name in CONFIGS:
        return CONFIGS[name]
    path = Path(name)
    return hub.read_config(path.parent if path.name == "config.json" and path.is_file() else name)


def _draft(spec: str, target: Any) -> Any:
    """What `draft_of` takes."""
    from mars_jax.models.medusa import MedusaConfig
    from mars_jax.planning.models import eagle3

    if spec == "eagle3":
        return eagle3(target)
    if spec == "medusa":
        size, vocab = target.hidden_size, target.vocab_size
        return MedusaConfig(num_heads=5, num_layers=1, hidden_size=size, vocab_size=vocab)
    try:
        kind, path = specs.parse_draft(spec, among=("none", "ngram", "model"))
    except MarsError:
        raise MarsError(f"--draft is {spec}: expected {_DRAFTS}.") from None
    return _config(path) if kind == "model" else spec


TAUS = (2, 3, 4)
"""Tokens a step, for which the table says the speed."""


def _step_rows(made: Any, batch: int) -> list[tuple[str, str]]:
    """The estimates by the compiler's schedule, where there is one."""
    step, alone = made.step, made.autoregressive_step
    if step is None or alone is None:
        return []

    def between(low: float, high: float, unit: str, digits: int) -> str:
        return f"{low:.{digits}f} to {high:.{digits}f}{unit}"

    low, high = step["low_seconds"], step["high_seconds"]
    rows = [
        ("a step by the schedule", between(1e3 * low, 1e3 * high, " ms", 2)),
        ("  without a draft", between(1e3 * alone["low_seconds"], 1e3 * alone["high_seconds"], " ms", 2)),
        ("  executed", f"{step['ops']} instructions, {step['collectives']} collectives"),
    ]
    if step is alone:
        return [*rows[::2], ("tokens/s", between(batch / high, batch / low, "", 0))]
    ratios = sorted(step[key] / alone[key] for key in ("low_seconds", "high_seconds"))
    rows.append(("a draft pays above tau", between(ratios[0], ratios[1], "", 2)))
    rows += [
        (f"tokens/s at tau {tau}", between(tau * batch / high, tau * batch / low, "", 0)) for tau in TAUS
    ]
    return rows


def _print(asked: dict[str, Any], made: Any, out: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    def gib(count: int) -> str:
        return f"{count / 2**30:.2f} GiB"

    mesh = ",".join(f"{name}={size}" for name, size in made.mesh.items())
    table = Table(
        title=f"{asked['target']} with {asked['draft']} on {made.topology}, {mesh}", show_header=False
    )
    used = f"{gib(made.held_bytes)} of {gib(made.hbm_bytes)}"
    table.add_row("fits", "yes" if made.fits else "no")
    table.add_row("memory of a device", used if made.held_bytes else "more than there is")
    table.add_row("  weights", gib(made.weight_bytes))
    table.add_row("  caches and state", gib(made.cache_bytes))
    table.add_row("read in a step, at least", gib(made.read_bytes))
    table.add_row("that over the bandwidth", f"{1e3 * made.floor_seconds:.2f} ms")
    table.add_row("  without a draft", f"{1e3 * made.autoregressive_floor_seconds:.2f} ms")
    for row in _step_rows(made, asked["batch"]):
        table.add_row(*row)
    table.add_row("compiled in", f"{made.compile_seconds:.0f} s")
    for name, count in made.collectives.items():
        table.add_row("collective", f"{count} x {name}")
    for note in made.notes:
        table.add_row("note", note)
    Console(file=out, soft_wrap=True, highlight=False).print(table)
