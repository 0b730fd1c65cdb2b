"""The rows of one run as an object of a store, which is written whole, by one writer: no lock holds there.

Rows go to a file here. It is uploaded with the first row, now and then, and at the end, however the run ends. When all
rows are there, `URL.done` says so. Oracle: the file of a run (tests/cli/test_remote.py).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mars_jax.cli import remote
from mars_jax.cli.generate.output_file import OutputFile, Recorded
from mars_jax.core.errors import MarsError, say
from mars_jax.serve.requests import Completion

SECONDS = 30.0
"""Time between two uploads, at least."""
SHARE = 0.1
"""Part of the time that uploads may take: all rows are written again, so that they take longer and longer."""


class UploadedFile(OutputFile):
    """An `OutputFile` here whose rows are uploaded."""

    def __init__(self, url: str, recorded: Recorded, *, resume: bool):
        """Read the object that an interrupted run left, and compare the settings that it was begun with.

        Raises:
          MarsError: as `OutputFile`, or the store does not give the object.
        """
        held: dict[str, bytes] = {}
        for ending in ("", ".settings.json"):
            with contextlib.suppress(FileNotFoundError):
                held[ending] = remote.read(f"{url}{ending}")
        # Not before: reading takes long, and a process that ends meanwhile would leave the folder.
        self._folder = Path(tempfile.mkdtemp(prefix="mars-jax-"))
        self._uploaded: int | None = None
        self._refused, self._next = False, 0.0
        here = self._folder / "rows.jsonl"
        try:
            for ending, data in held.items():
                Path(f"{here}{ending}").write_bytes(data)
            super().__init__(url, recorded, resume=resume, here=here)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def rows(self) -> int:
        """Number of rows of the object."""
        return self.finished if self._uploaded is None else self._uploaded

    def append(self, completion: Completion, run: Mapping[str, Any] | None = None) -> None:
        """Write one row, and upload all of them where it is time to.

        Raises:
          MarsError: the disk does not take it, or the store refuses the first upload. A later one is tried again.
        """
        with self._writing:
            super().append(completion, run)
            if time.monotonic() < self._next:
                return
            try:
                self._upload()
            except MarsError as error:
                self._refused = self._uploaded is None
                if self._refused:  # better now than after hours of work
                    raise
                self._next = time.monotonic() + SECONDS
                say(f"note: {str(error).rstrip('.')}; it is tried again.")

    def _upload(self) -> None:
        began = time.monotonic()
        if self._uploaded is None:
            remote.remove(f"{self._path}{remote.DONE}")  # of a run that had fewer prompts
            if self._beside.exists():
                remote.write(f"{self._path}.settings.json", self._beside.read_bytes())
        lines = self.whole_lines()
        remote.write(self._path, lines)
        self._uploaded = lines.count(b"\n")
        now = time.monotonic()
        self._next = now + max(SECONDS, (now - began) / SHARE)

    def close(self) -> None:
        """Upload what is left, and the mark of the end where all rows are there.

        Raises:
          MarsError: the store does not take it; the rows stay in a file here, which the sentence names.
        """
        with self._writing:
            super().close()
            if not self._folder.exists():
                return
            try:
                if not self._refused and self.rows != self.whole_lines().count(b"\n"):
                    self._upload()
                if len(self._rows) == self.finished and self.rows == len(self._requests) > 0:
                    remote.write(f"{self._path}{remote.DONE}", f"{self.rows}\n".encode())
            except MarsError as error:
                told = f"until then all rows are in '{self._journal.path}', which you can copy there"
                raise MarsError(f"{str(error).rstrip('.')}; {told}.") from None
            shutil.rmtree(self._folder, ignore_errors=True)
