"""A share of the rows of a run, for machines that know nothing of each other: `--part I/N`, or `auto`.

Part I has rows I, I + N, I + 2 N and so on, in a file or folder of its own, which is resumed alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from mars_jax.cli import remote
from mars_jax.core.errors import MarsError

PART_HELP = (
    "decode rows I, I + N, I + 2 N ... alone, into NAME-0000I-of-0000N; auto: as Slurm, Kubernetes or a TPU pod number "
    "this process; mars-jax merge puts the parts together"
)
_ARRAY = "SLURM_ARRAY_TASK"
_SCHEDULERS = {
    f"{_ARRAY}_ID": f"{_ARRAY}_COUNT",
    "SLURM_PROCID": "SLURM_NTASKS",
    "JOB_COMPLETION_INDEX": "JOB_COMPLETIONS",  # Kubernetes tells the first alone
    "TPU_WORKER_ID": "TPU_WORKER_HOSTNAMES",
}
"""Variables in which schedulers number their processes, and those that tell how many there are."""


class Part(NamedTuple):
    """A share of the rows of a run."""

    number: int
    of: int
    rows: int = 0  # of all parts together
    prompts: str = ""  # a digest of all of them

    def share(self) -> slice:
        """Return the rows of the part.

        >>> list(range(7))[Part(1, 3).share()]
        [1, 4]
        """
        return slice(self.number, None, self.of)

    def among(self, rows: int) -> Part:
        """Return the part of so many rows.

        Raises:
          MarsError: it has none of them.
        """
        if self.number >= rows:
            told = f"--part {self.number}/{self.of} has none of the {rows} rows"
            raise MarsError(f"{told}: take fewer parts.")
        return self._replace(rows=rows)

    def unfinished(self, folder: Path | str) -> MarsError:
        """Return the error of a folder, or a file, that lacks rows."""
        return MarsError(
            f"'{folder}' is unfinished: run it again with --part {self.number}/{self.of}, and it goes on."
        )

    def damaged(self, folder: Path) -> MarsError:
        """Return the error of a folder that cannot be read."""
        return MarsError(
            f"'{folder}' is damaged: remove it, and run it again with --part {self.number}/{self.of}."
        )


def parse_part(text: str, environment: Mapping[str, str] = os.environ) -> Part:
    """Return the part that a flag names.

    Args:
      text: I/N, or "auto": what a scheduler says in the environment.
      environment: variables by name.

    Raises:
      MarsError: it is not I/N with I below N, or no scheduler says which part this is, or two differ.

    >>> parse_part("3/16")[:2]
    (3, 16)
    >>> parse_part("auto", {"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "16"})[:2]
    (3, 16)
    """
    if text == "auto":
        return _scheduled(environment)
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
    if found is None or int(found[1]) >= int(found[2]):
        raise MarsError(f"--part is {text!r}: expected auto, or I/N, such as 0/4, with I from 0 to N - 1.")
    return Part(int(found[1]), int(found[2]))


def _scheduled(environment: Mapping[str, str]) -> Part:
    """Return the part that the schedulers name. One with a single process has no say beside one with several."""
    found = {
        number: _numbered(environment, number, count)
        for number, count in _SCHEDULERS.items()
        if number in environment
    }
    _check_srun(environment, found)
    if f"{_ARRAY}_ID" in found:
        found.pop("SLURM_PROCID", None)  # of the task's one process
    several = {number: part for number, part in found.items() if part.of > 1} or found
    if not several:
        raise MarsError(
            f"--part is auto, and none of {', '.join(_SCHEDULERS)} is set: start it by a scheduler, or give I/N."
        )
    if len(set(several.values())) > 1:
        told = " and ".join(f"{number} says {part.number}/{part.of}" for number, part in several.items())
        raise MarsError(f"--part is auto, and {told}: give I/N.")
    return next(iter(several.values()))


def _check_srun(environment: Mapping[str, str], found: Mapping[str, Part]) -> None:
    """Raise MarsError where Slurm counts processes that are none, or are no parts."""
    part = found.get("SLURM_PROCID")
    if part is None or part.of == 1:
        return
    if f"{_ARRAY}_ID" in found:
        raise MarsError(
            f"--part is auto, and each task of the Slurm array has {part.of} processes: give them one, or give I/N."
        )
    if "SLURM_STEP_NODELIST" not in environment:  # the batch script itself, by which JAX tells it too
        raise MarsError(f"--part is auto, and Slurm has {part.of} tasks: start it by srun, or give I/N.")


def _numbered(environment: Mapping[str, str], number: str, count: str) -> Part:
    """Return the part that a scheduler names."""
    text, told = environment[number], environment.get(count, "")
    if number == f"{_ARRAY}_ID":
        # Where some tasks of an array are begun again, the count is theirs and not that of the parts.
        first, last = (environment.get(f"{_ARRAY}_{end}", "?") for end in ("MIN", "MAX"))
        if first != "0" or told == "1" or told != str(int(last) + 1 if last.isdigit() else last):
            raise MarsError(
                f"--part is auto, and the Slurm array has {told} tasks from {first} to {last}: begin it with one such "
                "as --array=0-15, or give I/N."
            )
    of = str(len(told.split(","))) if count == "TPU_WORKER_HOSTNAMES" and told else told
    try:
        return parse_part(f"{text}/{of}")
    except MarsError:
        raise MarsError(
            f"--part is auto, and {number} is {text!r} with {count} {told!r}: set both, or give I/N."
        ) from None


def part_path(path: str | Path, part: Part, *, folder: bool = False) -> str:
    """Return the file of a part, or its folder, or its URL.

    >>> part_path("runs/out.jsonl", Part(3, 16)), part_path("qwen2.5", Part(3, 16), folder=True)
    ('runs/out-00003-of-00016.jsonl', 'qwen2.5-00003-of-00016')
    >>> part_path("gs://bucket/out.jsonl", Part(3, 16))
    'gs://bucket/out-00003-of-00016.jsonl'
    """
    if remote.is_url(path):
        store, slash, name = str(path).rpartition("/")
        return f"{store}{slash}{part_path(name, part, folder=folder)}"
    file = Path(path)
    stem, suffix = (file.name, "") if folder else (file.stem, file.suffix)
    return str(file.with_name(f"{stem}-{part.number:05d}-of-{part.of:05d}{suffix}"))


def parts_of(path: Path | str) -> dict[Part, Path | str]:
    """Return the parts of a run, in order, and the file or the folder of each.

    Args:
      path: the --output that the parts were given; a text where it is a URL, as theirs are then.

    Raises:
      MarsError: there are none, one is missing, or they are of several runs.
    """
    named = PurePath(path)
    files = re.compile(rf"{re.escape(named.stem)}-(\d{{5}})-of-(\d{{5}}){re.escape(named.suffix)}")
    folders = re.compile(rf"{re.escape(named.name)}-(\d{{5}})-of-(\d{{5}})")
    there = {}
    for file in path.parent.glob("*") if isinstance(path, Path) else _objects(path):
        folder = isinstance(file, Path) and file.is_dir()
        if found := (folders if folder else files).fullmatch(PurePath(file).name):
            there[folder, Part(int(found[1]), int(found[2]))] = file
    runs = sorted({(part.of, folder) for folder, part in there})
    if len(runs) != 1:
        told = f"parts of {' and of '.join(str(of) for of, _ in runs)} runs" if runs else "no parts"
        raise MarsError(f"there are {told} of '{path}': give the --output of one run with --part I/N.")
    [(of, folder)] = runs
    for number in range(of):
        part = Part(number, of)
        if (folder, part) not in there:
            missing = part_path(path, part, folder=folder)
            raise MarsError(f"'{missing}' is missing: decode it with --part {number}/{of}.")
    return {part: there[folder, part] for part in (Part(number, of) for number in range(of))}


def _objects(url: str) -> list[str]:
    """Return the URLs of the objects beside one."""
    store, slash, _ = url.rpartition("/")
    return [f"{store}{slash}{name}" for name in remote.names(store + slash)]


def rows_of(file: Path | str, part: Part, told: Mapping[str, Any]) -> int:
    """Return the rows of all parts together, as a part has recorded them.

    Args:
      file: of the part.
      part: that its name says.
      told: the part that its settings say.

    Raises:
      MarsError: it is another part, or has not ended, where their number is known at the end alone.
    """
    found = Part(**told)
    if found[:2] != part[:2]:
        raise MarsError(
            f"'{file}' holds part {found.number}/{found.of}: decode it again with --part {part.number}/{part.of}."
        )
    if not found.rows:
        raise part.unfinished(file)
    return found.rows
