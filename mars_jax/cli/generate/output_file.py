"""The file of finished rows: those of one run, with its settings beside it, in the order of the prompts.

`FILE.settings.json` has what decides the rows, the weights too, so that `--resume` adds no others. See `journal` for
how rows survive. Where the file is a URL, rows are written here and uploaded now and then: see `uploaded_file`.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mars_jax import specs
from mars_jax.cli.generate.applies import Choices
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.generate.rows import row_head, to_row
from mars_jax.cli.rule_flags import FLAGS
from mars_jax.core.errors import MarsError, say
from mars_jax.hub.files import resolve
from mars_jax.serve.fingerprint import fingerprint
from mars_jax.serve.journal import Journal, could_begin, difference, parse, plain, to_line, write_whole
from mars_jax.serve.requests import Completion, Request
from mars_jax.serve.session import Session
from mars_jax.specs import DraftSpec

_OTHER = "choose another --output, or the flags of the run that began it"


_ELSEWHERE = {
    "prompts", "prompts_file",  # rows are compared with their prompts one by one
    "output", "resume", "json", "stream", "compare",
    "draft_is_default",  # so that its drafts may vary in size, which changes no token
    # A row alone is the row in a batch, on one device or on many.
    "batch_size", "prefill_chunk", "mesh", "draft_device", "coordinator", "num_processes", "process_id",
    "no_check",  # whether checksums are compared, not what is loaded
    "theta_file", "rule", "rule_option", *FLAGS,  # what they choose is recorded as the rule's settings
}  # fmt: skip
"""Flags that decide no row. Every other one is recorded, also one that does not exist yet."""
_DEFAULTS = {name: row.default for name, row in specs.REQUEST.items() if row.default is not None}


class Recorded(NamedTuple):
    """The settings of a run: JSON values that differ from the defaults."""

    settings: dict[str, Any]
    own: dict[str, dict[str, Any]]  # by the number of the prompt, where it chooses for itself
    weights: dict[str, str] | None = None  # a fingerprint of each, known when they are loaded


def recorded(args: argparse.Namespace, choices: Choices, rows: Sequence[PromptRow]) -> Recorded:
    """Return the settings of the flags and of the prompts file.

    A flag that is given with its default is one that is not given: both decode the same.
    """
    settings = {
        name: plain(value)
        for name, value in vars(args).items()
        if name not in _ELSEWHERE and not _is_default(name, value)
    }
    rule = choices.rule
    settings["verify"] = rule.spec
    for name, value in rule.settings.items():
        if value != rule.options[name].default:
            settings[name] = plain(value)
    own = {str(i): plain(row.settings | row.numbers) for i, row in enumerate(rows)}
    own = {number: chosen for number, chosen in own.items() if chosen}
    return Recorded(settings, own)


def _is_default(name: str, value: Any) -> bool:
    # By identity, since 0 equals False and is a setting.
    return value is None or value is False or (name in _DEFAULTS and value == _DEFAULTS[name])


def check_output(path: str, flag: str = "--output") -> None:
    """Raise MarsError where there can be no such file. It opens nothing."""
    file = Path(path)
    if file.exists() and not file.is_file():
        raise MarsError(f"{flag} '{path}' is not a regular file: choose another path.")
    if not file.exists() and not file.parent.is_dir():
        raise MarsError(f"there is no directory '{file.parent}' for {flag}: make it first.")


class OutputFile:
    """The rows of one run, whose process has the file for itself. Its content changes with the first `append`."""

    def __init__(self, path: str, recorded: Recorded, *, resume: bool, here: Path | None = None):
        """Lock the file, and compare the settings that it was begun with; before any model is loaded.

        Args:
          path: of the file, as messages name it.
          recorded: settings of the run.
          resume: whether it may exist.
          here: file that is written in its stead.

        Raises:
          MarsError: the file exists and is not to be resumed, cannot be written, is another process's, or was begun
            with other settings.
        """
        file = here or Path(path)
        check_output(str(file))
        existed = file.exists()
        self._path, self._recorded = path, recorded
        self._beside = Path(f"{file}.settings.json")
        self._journal = Journal(file, again="add --resume")
        self._rows: list[dict[str, Any]] = []
        self._requests: Sequence[Request] = ()
        self._rule = ""
        self._begun_with: dict[str, str] = {}
        # The main thread takes it for a row; the thread that ends the process takes it and keeps it.
        self._writing = threading.RLock()
        self._written = self._unrecorded = False
        try:
            if existed and not resume:
                raise MarsError(
                    f"--output '{path}' exists: add --resume to continue it, or choose another path."
                )
            self._compare()
        except MarsError:
            self.close()
            raise

    @property
    def finished(self) -> int:
        """Rows that are on file."""
        return len(self._journal.lines)

    def _compare(self) -> None:
        if not self.finished:
            return
        try:
            there = json.loads(self._beside.read_text(encoding="utf-8"))
            settings = dict(there["settings"])
            own = {number: dict(chosen) for number, chosen in there["own"].items()}
            self._begun_with = dict(there.get("weights") or {})
        except FileNotFoundError:
            self._unrecorded = True
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise MarsError(
                f"'{self._path}.settings.json' is damaged: remove it to resume without its protection."
            ) from None
        found = difference(settings, self._recorded.settings)
        if found is not None:
            raise MarsError(f"'{self._path}' was begun with {found}: {_OTHER}.")
        for index in range(self.finished):
            found = difference(own.get(str(index), {}), self._recorded.own.get(str(index), {}))
            if found is not None:
                raise MarsError(
                    f"line {index + 1} of '{self._path}' was decoded with {found}, by its prompts file: {_OTHER}."
                )

    def check_weights(self, weights: Mapping[str, str]) -> None:
        """Compare the weights with those that the file was begun with.

        Args:
          weights: the fingerprint of each checkpoint, by what it is.

        Raises:
          MarsError: one of them differs. A file of before they were recorded goes on with any.
        """
        for name, found in weights.items():
            if self._begun_with and self._begun_with.get(name) != found:
                raise MarsError(
                    f"'{self._path}' was begun with other weights of the {name}: choose another --output, or the "
                    "checkpoint of the run that began it."
                )
        self._recorded = self._recorded._replace(weights=dict(weights))

    def check(self, requests: Sequence[Request], rule: str) -> None:
        """Compare the rows on file with the prompts of this run.

        Raises:
          MarsError: the file holds anything else than the first rows of this run.
        """
        self._requests, self._rule = requests, rule
        if self.finished > len(requests):
            raise MarsError(f"'{self._path}' has more rows than there are prompts: {_OTHER}.")
        for line in self._journal.lines:
            self._read(line)
        if self._journal.torn:
            self._check_torn(self._journal.torn)
        if self._unrecorded:
            name = f"{Path(self._path).name}.settings.json"
            say(f"note: '{self._path}' has no {name}, so only its last rows are compared with this run.")

    def _read(self, line: bytes) -> None:
        number = len(self._rows) + 1
        where = f"line {number} of '{self._path}'"
        request, row = self._requests[number - 1], parse(line)
        if row is None or not {"prompt", "prompt_tokens", "rule", "tokens", "steps"} <= row.keys():
            raise MarsError(f"{where} is not a row that this command wrote: {_OTHER}.")
        was = (row["prompt"], row["prompt_tokens"], row.get("id"))
        if was != (request.prompt, list(request.prompt_tokens), request.id):
            raise MarsError(f"{where} is not about prompt {number} of this run: {_OTHER}.")
        if row["rule"] != self._rule:
            raise MarsError(f"{where} has the rule '{row['rule']}' and this run '{self._rule}': {_OTHER}.")
        self._rows.append(row)

    def _check_torn(self, torn: bytes) -> None:
        """Check that a torn row is this run's: another file, which merely lacks its last newline, is not cut off."""
        if self.finished < len(self._requests):
            head = to_line(row_head(self._requests[self.finished]))[:-1].encode()
            if could_begin(torn, head):
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

    def append(self, completion: Completion, run: Mapping[str, Any] | None = None) -> None:
        """Write one row, and return when it is on disk; before the first one, the settings.

        Args:
          completion: of the prompt.
          run: as of `to_row`.

        Raises:
          MarsError: the disk does not take it.
        """
        with self._writing:
            if not self._written and not self._unrecorded:
                try:
                    write_whole(self._beside, to_line(self._recorded._asdict()) + "\n")
                except OSError as error:
                    raise MarsError(
                        f"'{self._beside}' cannot be written ({error.strerror}): fix that."
                    ) from None
                self._written = True
            self._journal.append(to_row(completion, self._rule, run))

    def close(self) -> None:
        """Let go of the file. One that this run made and wrote nothing to goes."""
        with self._writing:
            self._journal.close()

    def end(self) -> str:
        """Close the file because a signal ends the process. No row can be written after this.

        Returns:
          The rest of the last line: how many rows the file has, and how to continue.

        Raises:
          MarsError: as `close`.
        """
        self._writing.acquire()
        self.close()
        if self.rows == len(self._requests) > 0:
            return f" with all {self.rows} rows in '{self._path}': nothing is left to do."
        of = f" of {len(self._requests)}" if self._requests else ""
        return f" with {self.rows}{of} rows in '{self._path}': run it again with --resume to go on."

    @property
    def rows(self) -> int:
        """Number of rows that are kept."""
        return self.whole_lines().count(b"\n")

    def whole_lines(self) -> bytes:
        """Return what is on disk, without a torn line."""
        path = self._journal.path
        data = path.read_bytes() if path.exists() else b""
        return data[: data.rfind(b"\n") + 1]


def fingerprints(session: Session, draft: DraftSpec) -> dict[str, str]:
    """Return a name for the weights of each that has any. Where there are several processes, all call it.

    Args:
      session: with the weights.
      draft: its drafter, as it was named.
    """
    target, drafter, rule = session.target, session.drafter, session.rule
    found = {"target": fingerprint(target.params, target.path)}
    if draft.path:
        of = [resolve(draft.checkpoint, weights=False)] if draft.checkpoint else []
        found["draft"] = fingerprint(drafter.params, *of)
    if jax.tree.leaves(rule.params):
        found["rule"] = fingerprint(rule.params)
    return found


class Unwritten:
    """Stand-in for the file in the processes that do not write it."""

    finished = 0

    def check_weights(self, weights: Mapping[str, str]) -> None:
        """Do nothing: the first process does."""

    def check(self, requests: Sequence[Request], rule: str) -> None:
        """Do nothing: the first process does."""

    def check_same(self, index: int, completion: Completion) -> None:
        """Do nothing: the first process does."""

    def append(self, completion: Completion, run: Mapping[str, Any] | None = None) -> None:
        """Do nothing: the first process does."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def end(self) -> str:
        """Return nothing: the first process has the rows."""
        return ""
