"""The ways of running a job: streamed text, whole rows, rows into a file, and the comparison."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mars_jax.cli.generate.compare import compare, to_table
from mars_jax.cli.generate.job import Job
from mars_jax.cli.generate.output_file import OutputFile, Unwritten
from mars_jax.cli.generate.rows import to_row
from mars_jax.cli.generate.terminal import TextPrinter, console, legend, statistics
from mars_jax.cli.progress import busy, counted, progress_bar
from mars_jax.core import activity
from mars_jax.placement import hosts
from mars_jax.serve.journal import to_line
from mars_jax.serve.requests import Completion, Request, StreamEvent, total
from mars_jax.serve.session import Batch


def stream_text(job: Job, out: IO[str], *, chat: bool, speedup: bool) -> None:
    """Print text as it is decided. Of prompts that share a batch the first streams, and the others follow."""
    printer, done = TextPrinter(console(out), colours=job.drafts), []
    with counted(len(job.requests)) as count:
        for batch in job.batches():
            with busy("compiling"):
                events = job.stream(batch)
            done.append(_show(job, printer, batch, events, chat=chat))
            count.advance(done[-1])
    plain = _stream(job.autoregressive) if speedup else None
    _report(job, done, colours=printer.colours, plain=plain)


def _show(
    job: Job,
    printer: TextPrinter,
    batch: Batch,
    events: Iterator[StreamEvent],
    *,
    chat: bool,
) -> list[Completion]:
    # A prompt shows up with its first tokens: weights that give none leave stdout empty.
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
    """The next batch would fail as well, and there is nothing to show."""
    if all(completion.finish_reason == "failed" for completion in done):
        job.check_finite()


def _row_by_row(events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
    """Events of row 0 as they come, then those of row 1, and so on."""
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


def print_text(job: Job, out: IO[str], *, chat: bool, speedup: bool) -> None:
    """Print each batch when it is done."""
    printer, done = TextPrinter(console(out), colours=False), []
    with counted(len(job.requests)) as count:
        for batch in job.batches():
            done.append(job.run(batch))
            count.advance(done[-1])
            _stop_if_all_failed(job, done[-1])
            for completion in done[-1]:
                printer.prompt(_text(job, completion.request), chat=chat)
                printer.piece("exact", completion.text)
                printer.end()
    alone = job.autoregressive
    plain = [alone.run(batch) for batch in alone.batches()] if speedup else None
    _report(job, done, plain=plain)


def _stream(alone: Job) -> list[list[Completion]]:
    """What the text would have taken without a draft, streamed as it was."""
    with busy("decoding once more autoregressively, for comparison"):
        streams = [alone.stream(batch) for batch in alone.batches()]
        return [[e.completion for e in events if e.completion is not None] for events in streams]


def print_json(job: Job, out: IO[str]) -> None:
    """Print each row when its batch is done."""
    with counted(len(job.requests)) as count:
        for batch in job.batches():
            completions = job.run(batch)
            count.advance(completions)
            for completion in completions:
                _print_row(job, completion, out)


def write_output(job: Job, file: OutputFile | Unwritten, out: IO[str], *, json: bool) -> None:
    """Append rows to a file, from where it ends, with a progress bar; and print them too if `json`.

    The batch that holds the last row on file is decoded again. It shows that the file belongs to this run,
    and completes itself in the very shapes of an uninterrupted run.
    """
    file.check(job.requests, job.session.rule_name)
    resumed, of = hosts.broadcast(file.finished), len(job.requests)
    if resumed == of:
        _errors().print(f"the --output holds all {of} rows already: nothing to do.")
        return
    first, done = 0, []
    with progress_bar(of, resumed) as count:
        for batch in job.batches():
            if first + len(batch.requests) >= resumed:
                completions = job.run(batch)
                _stop_if_all_failed(job, completions)
                on_file = max(resumed - first, 0)
                for index, completion in enumerate(completions[:on_file], start=first):
                    file.check_same(index, completion)
                for completion in completions[on_file:]:
                    file.append(completion)
                    if json:
                        _print_row(job, completion, out)
                done.append(completions[on_file:])
                count.advance(done[-1])
            first += len(batch.requests)
    _report(job, [batch for batch in done if batch])


def print_comparison(job: Job, out: IO[str], *, json: bool) -> None:
    """Print the comparison as a table, or as one object."""
    columns = (TextColumn("{task.description}"), BarColumn())
    screen = _errors()
    with (
        activity.doing("comparing") as going,
        Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar,
    ):
        task = bar.add_task("comparing")

        def progress(done: int, of: int) -> None:
            going.detail = f"{done} of {of} runs"
            bar.update(task, completed=done, total=of)

        comparison = compare(job, progress)
    if json:
        _print_line(comparison, out)
        return
    screen = console(out)
    # A pipe has no width, and must not cut the table to that of some terminal.
    screen.print(to_table(comparison), width=None if screen.is_terminal else 100)


def _text(job: Job, request: Request) -> str:
    return job.session.target.decode(request.prompt_tokens) if request.prompt is None else request.prompt


def _print_row(job: Job, completion: Completion, out: IO[str]) -> None:
    _print_line(to_row(completion, job.session.rule_name), out)


def _print_line(row: dict, out: IO[str]) -> None:
    out.write(to_line(row) + "\n")
    out.flush()


def _errors() -> Console:
    return console(sys.stderr)


def _report(
    job: Job,
    batches: list[list[Completion]],
    *,
    colours: bool = False,
    plain: list[list[Completion]] | None = None,
) -> None:
    """Totals on stderr, so that stdout stays the text. `plain` is the same decoded autoregressively."""
    everyone = [completion for batch in batches for completion in batch]
    seconds = _seconds(batches)
    screen = _errors()
    screen.print()
    if colours and screen.color_system is not None:
        screen.print(legend())
    metrics = total(everyone)
    screen.print(statistics(metrics, seconds, job.session.rule_name, drafts=job.drafts))
    if job.simulated:
        screen.print("acceptance was simulated: the text means nothing, and quality cannot be read from it")
    if plain is not None:
        baseline = total([completion for batch in plain for completion in batch]).emitted / _seconds(plain)
        screen.print(
            f"{metrics.emitted / seconds / baseline:.2f}x the speed of plain autoregression, which made "
            f"{baseline:.1f} tokens/s here"
        )


def _seconds(batches: list[list[Completion]]) -> float:
    # Rows of a batch share its time.
    return max(sum(max(completion.seconds for completion in batch) for batch in batches), 1e-9)
