"""`mars-jax compounding`: what relaxed tokens do to the text after them, and whether errors compound."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__
from mars_jax.cli.program import Parser, command
from mars_jax.cli.rule_flags import given_settings, rule_and_file
from mars_jax.core.errors import MarsError
from mars_jax.lab.commands import pair
from mars_jax.lab.provenance import provenance
from mars_jax.lab.theta import settings_of
from mars_jax.lab.ticking import ticking

_DESCRIPTION = """\
After a relaxed token, the strict rule continues the text twice: after that token, and after
the target's own. Their agreement, likelihood under the target and score by distance show
whether errors compound. A control does the same where the rule refuses to relax. All of it is
at temperature 0.
"""
_EPILOG = f"""\
examples:
  mars-jax compounding --task arithmetic --chat --problems 200 --output texts

{pair.TASKS}
OUTPUT gets rows.jsonl as texts finish, then compounding.json, compounding.md, the picture
compounding as PNG, SVG and PDF, and events.jsonl; the report goes to stdout too. After a
kill, the same command goes on where it was.
"""


def parser() -> Parser:
    """The parser; numbers are still texts."""
    made = pair.make_parser("compounding", _DESCRIPTION, _EPILOG)
    group = made.add_argument_group("study")
    group.add_argument(
        "--horizon", default="48", metavar="N", help="distances to look at (default: %(default)s)"
    )
    group.add_argument(
        "--per-text",
        default="2",
        metavar="N",
        help="relaxed tokens of a text, at random (default: %(default)s)",
    )
    group = made.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="DIR", help="a new folder, or one to go on with")
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags as values, in range and of use.

    Raises:
      MarsError: an unknown flag, a value out of range, a flag that does not apply to what the others choose.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    pair.convert(args)
    args.rule, file = rule_and_file(args.verify, given_settings(args), "mars")
    pair.check(args, args.rule, output="name a folder for the report")
    for name in ("horizon", "per_text"):
        setattr(args, name, pair.value_of(name.replace("_", "-"), "max_new_tokens", getattr(args, name)))
    rule = args.rule
    if "q" in rule.needs:
        raise MarsError(
            f"--verify {rule.name} does not apply at temperature 0, where rejection is exact: leave rejection out."
        )
    if rule.row.lossless:
        raise MarsError(
            f"--verify {rule.name} relaxes nothing, so there is nothing to follow: choose another rule."
        )
    args.theta_files = [] if file is None else [file]
    if file is not None:
        file.check(settings_of(args, temperature=0.0))
    if rule.settled().get("theta") == math.inf:
        raise MarsError("--theta is inf, at which nothing is relaxed: give a number.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(parse, _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.lab.folder import studying

    with studying(args, args.output, out) as (place, folder):
        _study(args, folder, place)


def _study(args: argparse.Namespace, folder: Path, out: IO[str]) -> None:
    from mars_jax.lab.commands.open_pair import open_study
    from mars_jax.lab.folder import open_rows
    from mars_jax.lab.pictures.style import check_installed
    from mars_jax.lab.studies import branch_report, branches
    from mars_jax.serve.fingerprint import digest, fingerprint

    problems, target, drafter = open_study(args, folder, lambda problems: check_installed())
    shown = ("max_new_tokens", "horizon", "per_text", "batch_size", "seed", "problems", "chat")
    settings = settings_of(args) | {
        "rule": args.rule.as_json(but=("theta",)),
        "theta": args.rule.settled().get("theta"),
    }
    settings |= {name: getattr(args, name) for name in shown}
    identity = {
        "tasks": args.task,
        "dtype": args.dtype,
        "mesh": args.mesh,
        "problems_digest": digest(repr(problems).encode()),
        "weights": fingerprint((target.params, drafter.params), target.path),
        "version": __version__,
        **pair.given(args),
    }
    with contextlib.closing(open_rows(folder, settings | identity)) as rows:
        tasks, events = {}, []
        for task in dict.fromkeys(p.task for p in problems):
            with ticking(f"of {task}") as tick:
                texts, found = branches.study(
                    target,
                    drafter,
                    [p for p in problems if p.task == task],
                    rule=args.rule,
                    chat=args.chat,
                    max_new_tokens=args.max_new_tokens,
                    horizon=args.horizon,
                    per_text=args.per_text,
                    batch_size=args.batch_size,
                    seed=args.seed,
                    progress=tick,
                    rows=rows,
                )
            tasks[task] = branch_report.summarize(texts, found, horizon=args.horizon, seed=args.seed)
            events += [{"task": task, **_rounded(event)} for event in found]
        summary = {"settings": settings, **provenance(), "tasks": tasks}
        kept = folder / "compounding.json"
        # Figures that were there already keep the date of their run.
        old = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if old.get("tasks") == json.loads(json.dumps(tasks)):
            summary = old
        _write(folder, summary, events)
    print(branch_report.markdown(summary), file=out, end="")


def _write(output: Path, summary: dict[str, Any], events: list[dict[str, Any]]) -> None:
    from mars_jax.lab.folder import write_json
    from mars_jax.lab.pictures.style import beside
    from mars_jax.lab.studies import branch_report
    from mars_jax.serve.rows import write_whole

    try:
        write_json(output / "compounding.json", summary)
        lines = [json.dumps(event, ensure_ascii=False) for event in events]
        write_whole(output / "events.jsonl", "".join(f"{line}\n" for line in lines))
        write_whole(output / "compounding.md", branch_report.markdown(summary))
        branch_report.draw(summary, beside(output / "compounding.png"))
    except OSError as error:
        raise MarsError(
            f"--output '{output}' cannot be written ({error.strerror}): fix that, then run the same command again."
        ) from None


def _rounded(event: Any) -> dict[str, Any]:
    """An event for its file; likelihoods to four places."""
    fields = dataclasses.asdict(event)
    return {
        name: [round(x, 4) for x in value] if name.endswith("log_p") else value
        for name, value in fields.items()
    }
