"""Output formats of a job: streamed text, finished text, JSON rows, rows in a file, and the comparison."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import IO

from rich.table import Table

from mars_jax import verify
from mars_jax.cli.generate.job import Job, JobCompletions
from mars_jax.cli.generate.output_file import missing_rows, to_row
from mars_jax.cli.generate.terminal import TextPrinter, console, legend, statistics
from mars_jax.cli.progress import Show, announce, progress, speed
from mars_jax.core.rule import LoadedRule
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.requests import Completion, Request, Result, total_metrics
from mars_jax.serve.rows import RowFile, to_line
from mars_jax.serve.text import ends_in_loop
from mars_jax.utils.errors import say
from mars_jax.utils.types import JsonObject

REPEATS = 5
"""Timed runs per row of the comparison; the table shows their median."""


def stream_text(job: Job, out: IO[str], *, chat: bool) -> None:
    """Print text as it is decoded, one prompt after another. Later prompts of a batch wait until earlier ones end."""
    printer, completions = TextPrinter(console(out), colours=job.drafts), []
    events, current_index = job.stream(), None
    start_time = time.perf_counter()
    with progress("prompts", bar=False) as show:
        for event in _one_by_one(events):
            if isinstance(event, Said):
                # Print a prompt with its first tokens, so that nothing is printed for failed prompts.
                if event.index != current_index:
                    printer.prompt(_text(job, job.requests[event.index]), chat=chat)
                    current_index = event.index
                for kind, text in event.pieces:
                    printer.piece(kind, text)
                continue
            if event.index == current_index:
                printer.end()
            completions.append(event.completion)
            job.finished.append(event.completion)
            show(len(completions), len(job.requests), "")
            all_failed = all(completion.finish_reason == "failed" for completion in completions)
            if all_failed and len(completions) in (job.session.batch_size, len(job.requests)):
                job.check_finite()  # other prompts would fail as well
    _report(job, completions, time.perf_counter() - start_time, colours=printer.colours)


def _one_by_one(events: Iterator[Said | Finished]) -> Iterator[Said | Finished]:
    """Yield the events of prompt 0 as they arrive, then those of prompt 1, and so on."""
    waiting_events: dict[int, list[Said | Finished]] = collections.defaultdict(list)
    current_index = 0
    for event in events:
        waiting_events[event.index].append(event)
        while waiting_events[current_index]:
            ready_events = waiting_events.pop(current_index)
            yield from ready_events
            if isinstance(ready_events[-1], Said):  # the current prompt has not ended
                break
            current_index += 1


def print_text(job: Job, out: IO[str], *, chat: bool) -> None:
    """Print each completion as soon as it and all earlier ones are done."""
    printer, completions = TextPrinter(console(out), colours=False), []
    job_completions = job.decode()
    with progress("prompts", bar=False) as show:
        for completion in _each(job_completions, show, len(job.requests)):
            printer.prompt(_text(job, completion.request), chat=chat)
            printer.piece("exact", completion.text)
            printer.end()
            completions.append(completion)
    _report(job, completions, job_completions.seconds)


def _each(decoding: JobCompletions, show: Show, count: int, first: int = 0) -> Iterator[Completion]:
    """Yield the completions, and show how many of `count` prompts are done, including `first` earlier ones."""
    num_tokens = num_steps = 0
    show(first, count, "")
    for num_done, completion in enumerate(decoding, start=first + 1):
        num_tokens += completion.metrics.emitted
        num_steps += completion.metrics.steps
        show(num_done, count, speed(num_tokens, num_steps, decoding.seconds))
        yield completion


def print_json(job: Job, out: IO[str]) -> None:
    """Print each row as soon as it and all earlier ones are done."""
    job_completions = job.decode()
    with progress("prompts", bar=False) as show:
        for index, completion in enumerate(_each(job_completions, show, len(job.requests))):
            _print_line(to_row(completion, job.session.rule_name, job.run_of(index)), out)


def write_output(job: Job, file: RowFile, out: IO[str], *, json: bool) -> None:
    """Decode the rows that the file lacks and append them, with a progress bar. If `json`, also print them."""
    missing_indices, total_rows = missing_rows(file, job.requests), len(job.requests)
    if not missing_indices:
        say(f"the --output has all {total_rows} rows already: nothing to do.")
        return
    decoded_completions = []
    job_completions = job.decode(missing_indices)
    with progress("prompts") as show:
        completions = _each(job_completions, show, total_rows, total_rows - len(missing_indices))
        # If the first batch fails, iteration stops before the end of `missing_indices`.
        for index, completion in zip(missing_indices, completions, strict=False):
            file.append(to_row(completion, job.session.rule_name, job.run_of(index)))
            if json:
                _print_line(file.rows[-1], out)
            decoded_completions.append(completion)
    _report(job, decoded_completions, job_completions.seconds)


def compare_ways(job: Job, show: Show) -> JsonObject:
    """Decode all requests `REPEATS` times in each way, alternating the ways, so that slow phases affect all of them.

    A user's lossy rule is also compared with `mars` at its default theta. Compilation happens beforehand and is not
    timed. `show(done, total, "")` is called after every run.

    Raises:
      MarsError: see `Session.decode`.
    """
    pair, requests = job.session, job.requests
    exact = pair.using(LoadedRule(verify.exact()))
    sessions = {"autoregressive": pair.autoregressive, "exact": exact, pair.rule_name: pair}
    if verify.is_own(job.run["verify"]) and not pair.loaded_rule.rule.lossless:
        sessions.setdefault("mars", pair.using(LoadedRule(verify.mars())))
    for session in sessions.values():
        session.warm_up(requests)
    results_by_rule: dict[str, list[Result]] = {name: [] for name in sessions}
    num_runs = REPEATS * len(sessions)
    announce(f"{num_runs} runs of {len(requests)} prompts", num_runs * pair.plain_seconds(requests))
    for number, (name, session) in enumerate(REPEATS * [*sessions.items()], start=1):
        results_by_rule[name].append(session.decode(requests))
        show(number, num_runs, "")
    rows = [_row(name, results) for name, results in results_by_rule.items()]
    for row in rows:
        # The first row is the target without a draft.
        row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return {"prompts": len(requests), "batch_size": pair.batch_size, "repeats": REPEATS, "rules": rows}


def _row(name: str, results: list[Result]) -> JsonObject:
    metrics = results[0].metrics  # every repeat decodes the same tokens
    seconds = median(result.seconds for result in results)
    loop_flags = [ends_in_loop(c.tokens, c.request.stop_tokens) for c in results[0].completions]
    return {
        "rule": name,
        "tokens": metrics.emitted,
        "seconds": seconds,
        "tokens_per_second": metrics.emitted / max(seconds, 1e-9),
        "speedup": 1.0,
        "steps": metrics.steps,
        "tau": metrics.tau,
        "relaxed_share": metrics.relaxed_share,
        "loop_rate": sum(loop_flags) / len(loop_flags),
    }


def to_table(comparison: JsonObject) -> Table:
    """Return the comparison as a table to print."""
    num_prompts, num_repeats = comparison["prompts"], comparison["repeats"]
    table = Table(
        caption=f"{num_prompts} prompt{'s' * (num_prompts != 1)}, "
        f"batches of {comparison['batch_size']}, median of {num_repeats} runs; relaxed: share of the accepted draft "
        "tokens; loops: share of texts that end in a repeated phrase, which is easy to draft",
        caption_justify="left",
    )
    table.add_column("rule")
    for name in ("tokens/s", "speedup", "tau", "relaxed", "loops"):
        table.add_column(name, justify="right")
    for row in comparison["rules"]:
        relaxed_text = "-" if row["rule"] == "autoregressive" else f"{row['relaxed_share']:.1%}"
        cells = f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x", f"{row['tau']:.2f}"
        table.add_row(row["rule"], *cells, relaxed_text, f"{row['loop_rate']:.0%}")
    return table


def print_comparison(job: Job, out: IO[str], *, json: bool) -> None:
    """Print the comparison as a table, or as one JSON object."""
    with progress("runs") as show:
        comparison = compare_ways(job, show)
    if json:
        _print_line(comparison, out)
        return
    screen = console(out)
    # A pipe has no width, so use a fixed one.
    screen.print(to_table(comparison), width=None if screen.is_terminal else 100)


def _text(job: Job, request: Request) -> str:
    if request.prompt is not None:
        return request.prompt
    return job.session.target.decode(request.prompt_tokens)


def _print_line(row: JsonObject, out: IO[str]) -> None:
    out.write(to_line(row) + "\n")
    out.flush()


def _report(job: Job, completions: list[Completion], seconds: float, *, colours: bool = False) -> None:
    """Print totals on stderr."""
    screen = console(sys.stderr)
    screen.print()
    if colours and screen.color_system is not None:
        screen.print(legend(screen.width, trusts=job.trusts))
    metrics = total_metrics(completions)
    screen.print(statistics(metrics, seconds, job.session.rule_name, drafts=job.drafts))
    if job.refining is not None:
        screen.print(job.refining.describe())
    if job.simulated:
        screen.print("acceptance was simulated: the text means nothing, and quality cannot be read from it")
