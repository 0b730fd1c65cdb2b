"""Answers of a run of lm-evaluation-harness, one row each, so that the run continues after a kill.

The harness sends its requests in a fixed order, one kind after the other. A row has the number of its request among all
of them, so that the rows of several parts can be joined in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.serve.rows import RowFile, plain


class Answered(Exception):
    """The end of a part, which has no score. The message has the number of rows on file."""


class Answers:
    """The answers of one run, in a file that its process has locked."""

    def __init__(self, file: RowFile, part: slice | None):
        """
        Args:
          file: of the rows, after `RowFile.start`.
          part: of all requests; None for the whole run.
        """
        self._file, self._part = file, part
        self._by_request = {row.get("id"): row for row in file.rows}
        self._count, self._answered, self._ended = 0, 0, False

    def of(
        self, kind: str, requests: Sequence[Any], answer: Callable[[Sequence[int]], Iterable[Any]], other: Any
    ) -> list[Any]:
        """Return the answers to the requests of one call of the harness.

        Args:
          kind: of the requests.
          requests: of the call.
          answer: answers the requests with some indices, in their order. Each answer is written at once.
          other: placeholder for the answers of other parts.

        Raises:
          MarsError: the file answers other requests, or cannot be written.
        """
        if self._ended:
            raise MarsError(f"the run of '{self._file.path}' has ended: make another model for another run.")
        try:
            return self._answers(kind, requests, answer, other)
        except BaseException:
            # A program that catches this may start the run again.
            self._file.close()
            raise

    def _answers(
        self, kind: str, requests: Sequence[Any], answer: Callable[[Sequence[int]], Iterable[Any]], other: Any
    ) -> list[Any]:
        answers = [other] * len(requests)
        missing = []
        for index, request in enumerate(requests):
            number = self._count + index
            if self._part is not None and number % self._part.step != self._part.start:
                continue
            row = self._by_request.get(number)
            if row is None:
                missing.append(index)
                continue
            if row.get("request") != _key(kind, request):
                raise MarsError(
                    f"row {number} of '{self._file.path}' answers another request: choose another --rows, or the tasks "
                    "of the run that began it."
                )
            answers[index] = row["answer"]
            self._answered += 1
        for index, value in zip(missing, answer(missing) if missing else (), strict=True):
            row = {"id": self._count + index, "request": _key(kind, requests[index]), "answer": plain(value)}
            self._file.append(row)
            answers[index] = row["answer"]
            self._answered += 1
        self._count += len(requests)
        return answers

    def end(self) -> None:
        """Close the file after the last request.

        Raises:
          Answered: this is a part.
          MarsError: the part has none of the requests.
        """
        if not self._count or self._ended:
            return
        self._ended = True
        self._file.close()
        if self._part is None:
            return
        if not self._answered:
            raise MarsError(f"--part has none of the {self._count} requests: divide them into fewer parts.")
        raise Answered(f"{self._file.path}: {self._answered} of {self._count} rows")


def _key(kind: str, request: Any) -> str:
    return f"{kind} {hashlib.sha256(repr(request.args).encode()).hexdigest()[:16]}"
