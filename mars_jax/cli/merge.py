"""`mars-jax merge`: what parts of a run wrote, put together.

The rows are those of one process, but for the times that they took. Oracle: a run in one process
(tests/cli/test_merge.py).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__
from mars_jax.cli.part import Part, part_path
from mars_jax.cli.program import Parser, command
from mars_jax.core.errors import MarsError

_DESCRIPTION = """\
Put the files of generate --part I/N together, in the order of the prompts. A part that is
missing or unfinished, or was decoded with other settings or weights, is refused.
"""
_EPILOG = """\
examples:
  mars-jax generate --prompts-file in.jsonl --output out.jsonl --part 0/2   # on one machine
  mars-jax generate --prompts-file in.jsonl --output out.jsonl --part 1/2   # on another
  mars-jax merge out.jsonl    # reads out-00000-of-00002.jsonl and out-00001-of-00002.jsonl
"""


def parser() -> Parser:
    """Make the parser."""
    made = Parser(prog="mars-jax merge", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument(
        "output", metavar="FILE", help="the --output that the parts were given; it is written here"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.serve.journal import to_line, write_whole  # jax loads with it

    target = Path(args.output)
    if target.exists():
        raise MarsError(f"'{target}' exists: remove it, or rename it.")
    lines, settings = merged(target)
    try:
        write_whole(Path(f"{target}.settings.json"), to_line(settings) + "\n")
        write_whole(target, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise MarsError(f"'{target}' cannot be written ({error.strerror}): mend that.") from None
    print(f"{target}: {len(lines)} rows", file=out)


def merged(target: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of all parts in the order of the prompts, and their settings.

    Raises:
      MarsError: there are none, one is missing, unfinished or damaged, or they differ in settings or weights.
    """
    from mars_jax.serve.journal import difference

    name = re.compile(rf"{re.escape(target.stem)}-(\d{{5}})-of-(\d{{5}}){re.escape(target.suffix)}")
    there = {file: found for file in target.parent.glob("*") if (found := name.fullmatch(file.name))}
    counts = {int(found[2]) for found in there.values()}
    if len(counts) != 1:
        told = f"parts of {' and of '.join(map(str, sorted(counts)))} runs" if counts else "no parts"
        raise MarsError(f"there are {told} of '{target}': give the --output of one run with --part I/N.")
    of = counts.pop()
    lines: dict[int, str] = {}
    own: dict[str, Any] = {}
    first: dict[str, Any] | None = None
    for number in range(of):
        file = Path(part_path(str(target), Part(number, of)))
        if file not in there:
            raise MarsError(f"'{file}' is missing: decode it with --part {number}/{of}.")
        rows, settings = _read(file)
        total = settings["settings"].pop("part")["rows"]
        if first is None:
            first = settings | {"rows": total}
        for what in ("settings", "weights"):
            found = difference(first[what] | {"rows": first["rows"]}, settings[what] | {"rows": total})
            if found is not None:
                raise MarsError(
                    f"'{file}' was decoded with {found} than the parts before it: decode it again."
                )
        wanted = len(range(total)[Part(number, of).share()])
        if len(rows) != wanted:
            raise MarsError(
                f"'{file}' holds {len(rows)} of {wanted} rows: go on with it by --part {number}/{of} --resume."
            )
        lines |= {number + of * i: row for i, row in enumerate(rows)}
        own |= {str(number + of * int(i)): chosen for i, chosen in settings["own"].items()}
    assert first is not None  # of is at least 1
    chosen = {str(i): own[str(i)] for i in range(len(lines)) if str(i) in own}
    return [lines[i] for i in range(len(lines))], {
        "settings": first["settings"], "own": chosen, "weights": first["weights"]
    }  # fmt: skip


def _read(file: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the whole lines of a part, and its settings."""
    beside = Path(f"{file}.settings.json")
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(beside.read_text(encoding="utf-8"))
        made = {name: dict(found[name] or {}) for name in ("settings", "own", "weights")}
        if not isinstance(made["settings"]["part"]["rows"], int):
            raise ValueError
    except FileNotFoundError as error:
        raise MarsError(f"there is no '{error.filename}': decode that part again.") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise MarsError(f"'{file}' or '{beside.name}' is damaged: decode that part again.") from None
    lines = text.splitlines()
    return lines if text.endswith("\n") or not text else lines[:-1], made
