"""A file of finished rows that survives being killed: whole lines, in order, on disk before the next one.

A row is one write of one line, followed by fsync. So a file is a run of intact rows and at most one torn line
at its end, which `--resume` cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mars_jax.cli.generate.rows import row_head, to_line, to_row
from mars_jax.core.errors import MarsError
from mars_jax.serve.requests import Completion, Request

_OTHER = "choose another --output, or the flags of the run that began it"


def check_output(path: str, *, resume: bool) -> None:
    """What can be known before any model is loaded.

    Raises:
      MarsError: the file exists and is not to be resumed, or could not be written.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        raise MarsError(f"--output '{path}' is not a regular file: choose another path.")
    if file.exists() and not resume:
        raise MarsError(f"--output '{path}' exists: add --resume to continue it, or choose another path.")
    if not file.exists() and not file.parent.is_dir():
        raise MarsError(f"there is no directory '{file.parent}' for --output: make it first.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise MarsError(f"--output '{path}' cannot be written: check its permissions.")


class OutputFile:
    """The rows of one run. Nothing on disk changes before the first `append`."""

    def __init__(self, path: str, requests: Sequence[Request], rule: str):
        """Read what an interrupted run left.

        Raises:
          MarsError: the file holds anything else than the first rows of this run.
        """
        self._path, self._requests, self._rule = path, requests, rule
        self._descriptor: int | None = None
        self._rows: list[dict[str, Any]] = []
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            data = b""
        *lines, torn = data.split(b"\n")
        self._intact = len(data) - len(torn)
        for line in lines:
            self._read(line)
        if torn:
            self._check_torn(torn)

    @property
    def finished(self) -> int:
        """Rows that are on file."""
        return len(self._rows)

    def _read(self, line: bytes) -> None:
        where = f"line {self.finished + 1} of '{self._path}'"
        if self.finished == len(self._requests):
            raise MarsError(f"'{self._path}' has more rows than there are prompts: {_OTHER}.")
        request = self._requests[self.finished]
        try:
            row = json.loads(line)
            was = (row["prompt"], row["prompt_tokens"], row.get("id"))
            rule, _, _ = row["rule"], row["tokens"], row["steps"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise MarsError(f"{where} is not a row that this command wrote: {_OTHER}.") from None
        if was != (request.prompt, list(request.prompt_tokens), request.id):
            raise MarsError(f"{where} is not about prompt {self.finished + 1} of this run: {_OTHER}.")
        if rule != self._rule:
            raise MarsError(f"{where} has the rule '{rule}' and this run '{self._rule}': {_OTHER}.")
        self._rows.append(row)

    def _check_torn(self, torn: bytes) -> None:
        """Only a torn row of this run is cut off; another file that merely lacks its last newline is not."""
        if self.finished < len(self._requests):
            head = to_line(row_head(self._requests[self.finished]))[:-1].encode()
            if torn.startswith(head) or head.startswith(torn):
                return
        raise MarsError(
            f"the last line of '{self._path}' is not the beginning of this run's next row: {_OTHER}."
        )

    def check_same(self, index: int, completion: Completion) -> None:
        """Raise MarsError where row `index` on file is not what this run decodes."""
        row = self._rows[index]
        if row["tokens"] != completion.tokens or row["steps"] != completion.metrics.steps:
            raise MarsError(
                f"line {index + 1} of '{self._path}' was decoded with other weights or settings: {_OTHER}."
            )

    def append(self, completion: Completion) -> None:
        """Write one row, and return when it is on disk.

        Raises:
          MarsError: the disk does not take it.
        """
        line = memoryview(to_line(to_row(completion, self._rule)).encode() + b"\n")
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.ftruncate(self._descriptor, self._intact)
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise MarsError(
                f"--output '{self._path}' cannot be written ({error.strerror}): mend that, then add --resume."
            ) from None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Unwritten:
    """What stands for the file in the processes that do not write it."""

    finished = 0

    def check_same(self, index: int, completion: Completion) -> None:
        """Nothing: the first process does."""

    def append(self, completion: Completion) -> None:
        """Nothing: the first process does."""

    def close(self) -> None:
        """Nothing is open."""
