"""The ways of running a job: streamed text, whole rows, rows into a file, and the comparison."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import Console

from mars_jax.cli.generate.compare import compare, to_table
from mars_jax.cli.generate.job import Decoding, Job
from mars_jax.cli.generate.output_file import missing_rows, to_row
from mars_jax.cli.generate.terminal import TextPrinter, console, legend, statistics
from mars_jax.cli.progress import Count, busy, counted, passing_bars, progress_bar
from mars_jax.serve.requests import Completion, Request, StreamEvent, total
from mars_jax.serve.rows import RowFile, to_line
from mars_jax.serve.session import Batch


def stream_text(job: Job, out: IO[str], *, chat: bool) -> None:
    """Print text as it is decided. The first prompt of a batch streams, and the others follow."""
    printer, done, clock = TextPrinter(console(out), colours=job.drafts), [], StepClock()
    with counted(len(job.requests)) as count:
        for batch in job.batches():
            with busy("compiling"):
                events = job.stream(batch)
            done.append(_show(job, printer, batch, clock.timed(events), chat=chat))
            count.advance(done[-1], _seconds(done))
    everyone = [completion for batch in done for completion in batch]
    with busy("timing a step without a draft, for comparison"):
        said = worth(job, everyone, clock)
    _report(job, everyone, _seconds(done), colours=printer.colours, worth=said)


def _show(
    job: Job,
    printer: TextPrinter,
    batch: Batch,
    events: Iterator[StreamEvent],
    *,
    chat: bool,
) -> list[Completion]:
    # Print a prompt with its first tokens, so that stdout stays empty if the model gives none.
    shown, done = None, []
    for event in _row_by_row(events):
        if event.completion is not None and not event.completion.tokens:
            done.append(event.completion)
            continue
        if event.row != shown:
            printer.prompt(_text(job, batch.requests[event.row]), chat=chat)
            shown = event.row
        for kind, text in event.pieces:
            printer.piece(kind, text)
        if event.completion is not None:
            printer.end()
            done.append(event.completion)
    _stop_if_all_failed(job, done)
    return done


def _stop_if_all_failed(job: Job, done: list[Completion]) -> None:
    """Raise MarsError if the whole batch failed, because the next batch would fail too."""
    if all(completion.finish_reason == "failed" for completion in done):
        job.check_finite()


class StepClock:
    """The number of streamed steps and their time, from the first to the last step of each batch."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0

    def timed(self, events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
        """Yield the events of one batch. The first step includes the prefill and is not counted."""
        first, now, steps = None, 0.0, 0
        for event in events:
            now = time.perf_counter()
            first = first or now
            if event.completion is not None:
                steps = max(steps, event.completion.metrics.steps - 1)
            yield event
        self.seconds, self.steps = self.seconds + now - (first or now), self.steps + steps


def worth(job: Job, done: list[Completion], clock: StepClock) -> str:
    """Describe the speed of drafting relative to plain decoding. Return "" if nothing was drafted.

    A step gives tau tokens and a plain step gives one. Both are timed while they stream. On a busy machine the timing
    may be wrong, so the message suggests --compare before --draft none.
    """
    if not (job.drafts and clock.steps and clock.seconds):
        return ""
    plain = job.plain_step
    # A step with a draft cannot be shorter than a plain one. Only noise makes it appear so.
    ratio = total(done).tau * min(1.0, plain * clock.steps / clock.seconds)
    said = f"{ratio:.2f}x the speed of plain decoding, whose step takes {1e3 * plain:.3g} ms here"
    if ratio >= 0.97:
        return said
    return f"{said}: the draft did not pay in this run; if --compare says so too, take --draft none"


def _row_by_row(events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
    """Yield the events of row 0 as they come, then those of row 1, and so on."""
    waiting: dict[int, list[StreamEvent]] = collections.defaultdict(list)
    current = 0
    for event in events:
        waiting[event.row].append(event)
        while waiting[current]:
            ready = waiting.pop(current)
            yield from ready
            if ready[-1].completion is None:
                break
            current += 1


def print_text(job: Job, out: IO[str], *, chat: bool) -> None:
    """Print each batch when it is done."""
    printer, done = TextPrinter(console(out), colours=False), []
    with counted(len(job.requests)) as count:
        decoding = _decoding(job)
        for completion in _each(decoding, count):
            printer.prompt(_text(job, completion.request), chat=chat)
            printer.piece("exact", completion.text)
            printer.end()
            done.append(completion)
    _report(job, done, decoding.seconds)


def _decoding(job: Job, order: Sequence[int] | None = None, *, hold: bool = True) -> Decoding:
    with busy("compiling"):
        return job.decode(order, hold=hold)


def _each(decoding: Decoding, count: Count) -> Iterator[Completion]:
    """Yield the completions, and count them."""
    for completion in decoding:
        count.advance([completion], decoding.seconds)
        yield completion


def print_json(job: Job, out: IO[str]) -> None:
    """Print each row when it and those before it are done."""
    with counted(len(job.requests)) as count:
        for index, completion in enumerate(_each(_decoding(job, hold=False), count)):
            _print_row(job, index, completion, out)


def write_output(job: Job, file: RowFile, out: IO[str], *, json: bool) -> None:
    """Decode the rows that the file lacks and append them, with a progress bar. Print them too if `json`."""
    missing, total_rows = missing_rows(file, job.requests), len(job.requests)
    if not missing:
        _errors().print(f"the --output has all {total_rows} rows already: nothing to do.")
        return
    done = []
    with progress_bar(total_rows, total_rows - len(missing)) as count:
        decoding = _decoding(job, missing)
        # If the first batch fails, iteration stops before the end of `missing`.
        for index, completion in zip(missing, _each(decoding, count), strict=False):
            file.append(to_row(completion, job.session.rule_name, job.run_of(index)))
            if json:
                _print_line(file.rows[-1], out)
            done.append(completion)
    _report(job, done, decoding.seconds)


def print_comparison(job: Job, out: IO[str], *, json: bool) -> None:
    """Print the comparison as a table, or as one object."""
    with passing_bars("comparing") as (going, bars):
        task = bars.add_task("comparing")

        def progress(done: int, of: int) -> None:
            going.detail = f"{done} of {of} runs"
            bars.update(task, completed=done, total=of)

        comparison = compare(job, progress)
    if json:
        _print_line(comparison, out)
        return
    screen = console(out)
    # A pipe has no width, so use a fixed one.
    screen.print(to_table(comparison), width=None if screen.is_terminal else 100)


def _text(job: Job, request: Request) -> str:
    return job.session.target.decode(request.prompt_tokens) if request.prompt is None else request.prompt


def _print_row(job: Job, index: int, completion: Completion, out: IO[str]) -> None:
    _print_line(to_row(completion, job.session.rule_name, job.run_of(index)), out)


def _print_line(row: dict, out: IO[str]) -> None:
    out.write(to_line(row) + "\n")
    out.flush()


def _errors() -> Console:
    return console(sys.stderr)


def _report(
    job: Job,
    everyone: list[Completion],
    seconds: float,
    *,
    colours: bool = False,
    worth: str = "",
) -> None:
    """Print totals and the speed of the draft on stderr, so that stdout holds only text."""
    seconds = max(seconds, 1e-9)
    screen = _errors()
    screen.print()
    if colours and screen.color_system is not None:
        screen.print(legend(screen.width, trusts=job.trusts))
    metrics = total(everyone)
    screen.print(statistics(metrics, seconds, job.session.rule_name, drafts=job.drafts))
    if job.refining is not None:
        screen.print(job.refining.describe())
    if job.simulated:
        screen.print("acceptance was simulated: the text means nothing, and quality cannot be read from it")
    if worth:
        screen.print(worth)


def _seconds(batches: list[list[Completion]]) -> float:
    # Rows of a batch share its time.
    return max(sum(max(completion.seconds for completion in batch) for batch in batches), 1e-9)
