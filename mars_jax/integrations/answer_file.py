"""Answers of a run of lm-evaluation-harness, a row each, in a file from which the run goes on and parts are merged.

The harness asks in a fixed order, one kind of request after the other: row i answers request i of all. Oracle: a run
without a file (tests/integrations/test_parts.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.cli import remote
from mars_jax.cli.generate.output_file import check_output
from mars_jax.cli.part import Part, parse_part, part_path
from mars_jax.core.errors import MarsError
from mars_jax.serve.journal import Journal, could_begin, difference, parse, plain, to_line, write_whole

_OTHER = "choose another --rows, or the flags of the run that began it"


class Answered(Exception):
    """The end of a part, whose rows alone make no score; it says what the file holds."""


def place_of(rows: str, part: str | None) -> tuple[Path, Part | None]:
    """Return the file of the answers, and the part that it has.

    Args:
      rows: the file, or the name from which that of a part is made.
      part: I/N, or "auto"; None for all requests.

    Raises:
      MarsError: the file is a URL, or there is no such part.
    """
    remote.refuse(rows, "rows")
    if part is None:
        return Path(rows), None
    parsed = parse_part(part)
    return Path(part_path(rows, parsed)), parsed


class Answers:
    """The file of one run, which its process has for itself."""

    def __init__(
        self,
        path: Path,
        part: Part | None,
        settings: Mapping[str, Any],
        weights: Mapping[str, str] | None = None,
    ):
        """Lock the file, and compare what it was begun with.

        Args:
          path: of the file.
          part: of the requests; None for all of them.
          settings: what decides the answers, beside the requests.
          weights: a fingerprint of each checkpoint; None before they are loaded, to compare the rest.

        Raises:
          MarsError: there can be no such file, it cannot be written, is another process's, or was begun with other
            settings or weights.
        """
        check_output(str(path), "--rows")
        self.path, self._part = path, part
        self._beside = Path(f"{self.path}.settings.json")
        self._told = {"settings": plain(settings), "own": {}, "weights": plain(weights)}
        # Those that the harness has asked for, and how many of this part's are on file.
        self._requests, self._rows, self._ended = 0, 0, False
        self._digest = hashlib.sha256()
        self._journal = Journal(self.path)
        try:
            if self._journal.lines:
                self._compare()
        except MarsError:
            self._journal.close()
            raise

    def _compare(self) -> None:
        try:
            there = json.loads(self._beside.read_text(encoding="utf-8"))
            told = {what: dict(there[what]) for what in ("settings", "weights")}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise MarsError(f"'{self._beside}' is damaged or missing: choose another --rows.") from None
        told["settings"].pop("part", None)
        for what, was in told.items():
            ours = self._told[what]
            if ours is not None and (found := difference(was, ours)):
                raise MarsError(f"'{self.path}' was begun with {found}: {_OTHER}.")

    def of(
        self, kind: str, requests: Sequence[Any], answer: Callable[[Sequence[int]], Iterable[Any]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the answers of this part, each with the number of its request among `requests`.

        Args:
          kind: of the requests.
          requests: of one call of the harness.
          answer: gives the answers to the requests of such numbers, in their order. Each is written at once.

        Raises:
          MarsError: the file has answers to other requests, or the disk does not take more.
        """
        try:
            yield from self._of(kind, requests, answer)
        except BaseException:  # a program that lives on may begin the run again
            self._journal.close()
            raise

    def _of(
        self, kind: str, requests: Sequence[Any], answer: Callable[[Sequence[int]], Iterable[Any]]
    ) -> Iterator[tuple[int, Any]]:
        if self._ended:
            raise MarsError(f"the run of '{self.path}' has ended: make another model for another run.")
        keys = [_key(kind, request) for request in requests]
        self._digest.update("".join(keys).encode())
        share = range(len(keys)) if self._part is None else range(*self._mine().indices(len(keys)))
        self._requests += len(keys)
        kept = self._journal.lines[self._rows :][: len(share)]
        for index, line in zip(share, kept, strict=False):
            self._rows += 1
            row = parse(line)
            if row is None or row.get("request") != keys[index] or "answer" not in row:
                raise MarsError(
                    f"line {self._rows} of '{self.path}' does not answer this run's request: {_OTHER}."
                )
            yield index, row["answer"]
        left = share[len(kept) :]
        if not left:
            return
        head = to_line({"request": keys[left[0]]})[:-1].encode()
        if self._rows == len(self._journal.lines) and not could_begin(self._journal.torn, head):
            raise MarsError(f"the last line of '{self.path}' does not answer this run's request: {_OTHER}.")
        self._settle({})
        for made, index in zip(answer(left), left, strict=True):
            row = {"request": keys[index], "answer": plain(made)}
            self._journal.append(row)
            self._rows += 1
            yield index, row["answer"]

    def _mine(self) -> slice:
        assert self._part is not None
        return slice((self._part.number - self._requests) % self._part.of, None, self._part.of)

    def _settle(self, part: Mapping[str, Any]) -> None:
        """Write the settings; of a part with how many requests there are, which is 0 until its end."""
        if self._part is not None:
            self._told["settings"]["part"] = {**self._part._asdict(), **part}
        try:
            write_whole(self._beside, to_line(self._told) + "\n")
        except OSError as error:
            raise MarsError(f"'{self._beside}' cannot be written ({error.strerror}): mend that.") from None

    def close(self) -> None:
        """Let go of the file. One that this run made and wrote nothing to goes."""
        self._journal.close()

    def end(self) -> None:
        """Close the file, as all requests have been answered.

        Raises:
          Answered: this is a part.
          MarsError: the file has more rows than there are requests, or the part has none of them.
        """
        if not self._requests or self._ended:
            return
        self._ended = True
        self._journal.close()
        if self._rows < len(self._journal.lines):
            raise MarsError(f"'{self.path}' has more rows than this run has requests: {_OTHER}.")
        if self._part is not None:
            ended = self._part.among(self._requests)
            self._settle({"rows": ended.rows, "prompts": self._digest.hexdigest()[:16]})
            raise Answered(f"{self.path}: {self._rows} of {ended.rows} rows")


def _key(kind: str, request: Any) -> str:
    return f"{kind} {hashlib.sha256(repr(request.args).encode()).hexdigest()[:16]}"
