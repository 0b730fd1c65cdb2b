"""Rows in an order that is known, a batch at a time: those on file are read, the others made and put there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.serve.journal import Journal, Row, parse

Key = Mapping[str, Any]
"""Fields that a row has to hold: what it is about."""


class RowFile:
    """The rows of one run, which a kill interrupts without harm.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> file = RowFile(path)
    >>> file.batch([{"id": 0}, {"id": 1}], lambda: [{"id": 0, "x": 5}, {"id": 1, "x": 6}])[1]["x"]
    6
    >>> file.close(); file = RowFile(path)
    >>> file.batch([{"id": 0}], lambda: 1 / 0)
    [{'id': 0, 'x': 5}]
    >>> file.close()
    """

    def __init__(self, path: Path, keys: Sequence[Key] | None = None):
        """Read what an interrupted run left, and hold the file against other processes.

        Args:
          path: of the file, which need not exist.
          keys: of all rows, in order, where they are known.

        Raises:
          MarsError: the file holds anything else than the first of these rows, or another process writes to it.
        """
        self.rows: list[Row] = []
        self._taken = 0
        self._journal = Journal(path)
        try:
            for number, line in enumerate(self._journal.lines):
                row = parse(line)
                if row is None or (keys is not None and number >= len(keys)):
                    raise self._other(number)
                self.rows.append(row)
            if keys is not None:
                self._check(0, keys[: len(self.rows)])
        except MarsError:
            self.close()
            raise

    def batch(self, keys: Sequence[Key], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """The next rows, in the order of `keys`. Where one of them is not on file, all are made as they were.

        Raises:
          MarsError: other rows are on file, or the disk does not take them.
        """
        first, last = self._taken, self._taken + len(keys)
        self._check(first, keys[: len(self.rows) - first])
        if len(self.rows) < last:
            for row in list(make())[len(self.rows) - first :]:
                self._journal.append(row)
                self.rows.append(row)
        self._taken = last
        return self.rows[first:last]

    def _check(self, first: int, keys: Sequence[Key]) -> None:
        for number, (row, key) in enumerate(zip(self.rows[first:], keys, strict=False), start=first):
            if any(name not in row or row[name] != value for name, value in key.items()):
                raise self._other(number)

    def _other(self, number: int) -> MarsError:
        return MarsError(
            f"line {number + 1} of '{self._journal.path}' is not what this run would write there: choose another "
            "--output."
        )

    def close(self) -> None:
        """Let go of the file."""
        self._journal.close()
