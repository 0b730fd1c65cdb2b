"""`mars-jax merge`: what parts of a run wrote, put together.

The rows are those of one process, but for the times that they took. Oracle: a run in one process
(tests/cli/test_merge.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__
from mars_jax.cli import extras, remote
from mars_jax.cli.part import Part, parts_of, rows_of
from mars_jax.cli.program import Parser, command
from mars_jax.core.errors import MarsError

_DESCRIPTION = """\
Put together what generate, benchmark, lm_eval or distill features wrote with --part I/N,
in the order of the prompts. A part that is missing or unfinished, or was decoded with other
settings or weights, is refused.
"""
_EPILOG = """\
examples:
  # on one machine
  mars-jax generate --prompts-file in.jsonl --output out.jsonl --part 0/2
  # on another
  mars-jax generate --prompts-file in.jsonl --output out.jsonl --part 1/2
  # reads out-00000-of-00002.jsonl and out-00001-of-00002.jsonl
  mars-jax merge out.jsonl
  # where the parts were given such an --output
  mars-jax merge gs://bucket/out.jsonl
  # answers of lm_eval, by its --rows
  mars-jax merge rows.jsonl
  # folders of benchmark: evidence-00000-of-00002 and so on
  mars-jax merge evidence
"""


def parser() -> Parser:
    """Make the parser."""
    made = Parser(prog="mars-jax merge", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument(
        "output", metavar="PATH", help="the --output that the parts were given; it is written here"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.serve.journal import to_line, write_whole  # jax loads with it

    target = args.output if remote.is_url(args.output) else Path(args.output)
    if target.exists() if isinstance(target, Path) else remote.exists(target):
        raise MarsError(f"'{target}' exists: remove it, or rename it.")
    parts = parts_of(target)
    one = next(iter(parts.values()))
    if isinstance(one, Path) and one.is_dir():
        print(f"{target}: {extras.call('merge', parts, target)}", file=out)
        return
    lines, settings = merged(parts)
    text = "".join(f"{line}\n" for line in lines)
    if isinstance(target, str):
        remote.write(f"{target}.settings.json", to_line(settings).encode() + b"\n")
        remote.write(target, text.encode())
        remote.write(f"{target}{remote.DONE}", f"{len(lines)}\n".encode())
    else:
        try:
            write_whole(Path(f"{target}.settings.json"), to_line(settings) + "\n")
            write_whole(target, text)
        except OSError as error:
            raise MarsError(f"'{target}' cannot be written ({error.strerror}): fix that.") from None
    print(f"{target}: {len(lines)} rows", file=out)


def merged(parts: Mapping[Part, Path | str]) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of all files in the order of the prompts, and their settings.

    Raises:
      MarsError: one is unfinished or damaged, or they differ in settings or weights.
    """
    from mars_jax.serve.journal import difference

    lines: dict[int, str] = {}
    own: dict[str, Any] = {}
    first: dict[str, Any] | None = None
    for part, file in parts.items():
        rows, settings = _read(file)
        told = settings["settings"].pop("part")
        total = rows_of(file, part, told)
        asked = {"rows": total, "prompts": told.get("prompts")}
        if first is None:
            first = settings | {"asked": asked}
        for what in ("settings", "weights"):
            found = difference(first[what] | first["asked"], settings[what] | asked)
            if found is not None:
                raise MarsError(
                    f"'{file}' was decoded with {found} than the parts before it: decode it again."
                )
        numbers = range(total)[part.share()]
        if isinstance(file, str):
            _check_done(file, part, len(rows))
        if len(rows) != len(numbers):
            if "max_gen_toks" in settings["settings"]:  # of lm_eval, whose files go on without a flag
                raise part.unfinished(file)
            raise MarsError(
                f"'{file}' holds {len(rows)} of {len(numbers)} rows: go on with it by --part {part.number}/{part.of} "
                "--resume."
            )
        lines |= dict(zip(numbers, rows, strict=True))
        own |= {str(numbers[int(i)]): chosen for i, chosen in settings["own"].items()}
    assert first is not None  # there is a part
    chosen = {str(i): own[str(i)] for i in range(len(lines)) if str(i) in own}
    return [lines[i] for i in range(len(lines))], {
        "settings": first["settings"], "own": chosen, "weights": first["weights"]
    }  # fmt: skip


def _check_done(url: str, part: Part, rows: int) -> None:
    """Check that the run which writes an object has ended: its rows alone do not tell."""
    with contextlib.suppress(FileNotFoundError):
        if remote.read(f"{url}{remote.DONE}").strip() == str(rows).encode():
            return
    raise MarsError(
        f"'{url}' has {rows} rows and no '{remote.DONE}' of {rows} beside it: wait for its run, or go on with it by "
        f"--part {part.number}/{part.of} --resume."
    )


def _read(file: Path | str) -> tuple[list[str], dict[str, Any]]:
    """Return the whole lines of a part, and its settings."""
    beside = f"{file}.settings.json"
    try:
        text, told = (_bytes(name).decode() for name in (str(file), beside))
        found = json.loads(told)
        made = {name: dict(found[name] or {}) for name in ("settings", "own", "weights")}
        Part(**made["settings"]["part"])
    except FileNotFoundError as error:
        raise MarsError(f"there is no '{error.filename or beside}': decode that part again.") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise MarsError(f"'{file}' or '{Path(beside).name}' is damaged: decode that part again.") from None
    return text.split("\n")[:-1], made


def _bytes(name: str) -> bytes:
    return remote.read(name) if remote.is_url(name) else Path(name).read_bytes()
