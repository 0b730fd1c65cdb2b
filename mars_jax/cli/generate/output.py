"""Output of a job: text, JSON rows, rows in a file with the run's settings, or a comparison table."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import IO

import jax
from rich.table import Table

from mars_jax import verify
from mars_jax.cli.flags import SAMPLING
from mars_jax.cli.generate.job import Job, JobCompletions, in_order
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.generate.terminal import TextPrinter, console, legend, statistics
from mars_jax.cli.progress import Show, announce, progress, speed
from mars_jax.cli.rule_flags import FLAGS
from mars_jax.drafters.registry import DraftSpec
from mars_jax.hub.files import resolve
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.requests import Completion, Request, Result, TokenLogProbs
from mars_jax.serve.rows import RowFile, digest, fingerprint, plain, to_line
from mars_jax.serve.session import Session
from mars_jax.serve.text import ends_in_loop
from mars_jax.utils.errors import MarsError, say
from mars_jax.utils.settings import REQUEST
from mars_jax.utils.types import JsonObject
from mars_jax.verify import LoadedRule, is_own, source_digest

REPEATS = 5
"""Timed runs per row of the comparison; the table shows their median."""


_ELSEWHERE = {
    # The digest of the prompts covers these flags.
    "prompts", "prompts_file",
    "output", "resume", "json", "stream", "compare", "part",
    # This flag only enables an adaptive draft length, which changes no tokens.
    "draft_is_default",
    # A row's tokens do not depend on its batch or on the number of devices.
    "batch_size", "prefill_chunk", "mesh", "draft_device", "coordinator", "num_processes", "process_id",
    # This flag controls whether checksums are compared, not which weights are loaded.
    "no_check",
    # These flags are covered by the rule's settings, which are recorded.
    "theta_file", "rule", "rule_option", *FLAGS,
}  # fmt: skip
"""Flags that are not recorded in rows, because they do not change any tokens or because other settings cover them. All
other flags are recorded, including flags that are added later."""
_METRICS = ("steps", "tau", "proposed", "accepted_exact", "accepted_relaxed", "depth_histogram")
"""Metrics that each row contains."""
_DEFAULTS = {name: row.default for name, row in REQUEST.items()}


def stream_text(job: Job, out: IO[str], *, chat: bool) -> None:
    """Print text as it is decoded, one prompt after another. Hold back later text until earlier prompts are done."""
    printer, completions = TextPrinter(console(out), colours=job.drafts), job.finished
    numbered_events, current_index = ((event.index, event) for event in job.stream()), None
    start_time = time.perf_counter()
    with progress("prompts", bar=False) as show:
        for event in in_order(numbered_events, range(len(job.requests)), ends=_is_last):
            if isinstance(event, Said):
                # Print each prompt only when its first tokens arrive, so that nothing is printed for failed prompts.
                if event.index != current_index:
                    printer.prompt(_text(job, job.requests[event.index]), chat=chat)
                    current_index = event.index
                for kind, text in event.pieces:
                    printer.piece(kind, text)
                continue
            if event.index == current_index:
                printer.end()
            completions.append(event.completion)
            show(len(completions), len(job.requests), "")
            all_failed = all(completion.finish_reason == "failed" for completion in completions)
            if all_failed and len(completions) in (job.session.batch_size, len(job.requests)):
                job.check_finite()  # other prompts would fail as well
    _report(job, time.perf_counter() - start_time, colours=printer.colours)


def _is_last(event: Said | Finished) -> bool:
    return isinstance(event, Finished)


def print_text(job: Job, out: IO[str], *, chat: bool) -> None:
    """Print each completion as soon as it and all earlier ones are done."""
    printer, job_completions = TextPrinter(console(out), colours=False), job.decode()
    with progress("prompts", bar=False) as show:
        for completion in _each(job_completions, show, len(job.requests)):
            printer.prompt(_text(job, completion.request), chat=chat)
            printer.piece("exact", completion.text)
            printer.end()
    _report(job, job_completions.seconds)


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
            print(to_line(to_row(completion, job.session.rule_name, job.run_of(index))), file=out, flush=True)


def write_output(job: Job, file: RowFile, out: IO[str], *, json: bool) -> None:
    """Decode the rows missing from the file and append them, with a progress bar. If `json`, also print them."""
    missing_indices, total_rows = missing_rows(file, job.requests), len(job.requests)
    if not missing_indices:
        say(f"the --output has all {total_rows} rows already: nothing to do.")
        return
    job_completions = job.decode(missing_indices)
    with progress("prompts") as show:
        completions = _each(job_completions, show, total_rows, total_rows - len(missing_indices))
        # `completions` ends early if the first batch fails, and a strict zip would then raise an error.
        for index, completion in zip(missing_indices, completions, strict=False):
            file.append(to_row(completion, job.session.rule_name, job.run_of(index)))
            if json:
                print(to_line(file.rows[-1]), file=out, flush=True)
    _report(job, job_completions.seconds)


def compare_ways(job: Job, show: Show) -> JsonObject:
    """Decode all requests without a draft, with exact and with the rule, `REPEATS` times each, and return the speeds.

    The decoding methods take turns, so that a temporary slowdown of the machine affects all of them.

    A user's lossy rule is also compared with `mars` at its default theta. Everything is compiled beforehand, so
    compilation is not timed. `show(done, total, "")` is called after every run.

    Raises:
      MarsError: see `Session.decode`.
    """
    pair, requests = job.session, job.requests
    exact = pair.using(LoadedRule(verify.exact()))
    spec, rule_name = job.run["verify"], pair.rule_name
    sessions = {"autoregressive": pair.autoregressive, "exact": exact}
    if is_own(spec):
        # A user's function may return a rule of the library, such as `mars` with a different theta.
        function_name = spec.rpartition(":")[2]
        rule_name = spec if function_name in (*sessions, "mars") else function_name
    sessions[rule_name] = pair
    if is_own(spec) and not pair.loaded_rule.rule.lossless:
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
        "tokens; loops: share of completions that end in a repeated phrase, which is easy to draft",
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
        print(to_line(comparison), file=out, flush=True)
        return
    screen = console(out)
    # A pipe has no width, so use a fixed one.
    screen.print(to_table(comparison), width=None if screen.is_terminal else 100)


def _text(job: Job, request: Request) -> str:
    return request.prompt or job.session.target.decode(request.prompt_tokens)


def _report(job: Job, seconds: float, *, colours: bool = False) -> None:
    """Print the totals of a run to stderr."""
    screen = console(sys.stderr)
    screen.print()
    if colours and screen.color_system is not None:
        screen.print(legend(screen.width, trusts=job.trusts))
    screen.print(statistics(job.finished, seconds, job.session.rule_name, drafts=job.drafts))
    if job.refining is not None:
        screen.print(job.refining.describe())
    if job.simulated:
        screen.print("acceptance was simulated: the text means nothing, and its quality cannot be judged")


def recorded(args: argparse.Namespace, rows: Sequence[PromptRow]) -> JsonObject:
    """Return the settings of a run, as JSON values. Settings at their defaults are left out.

    Args:
      args: the flags.
      rows: the prompts of the whole run, including all parts.
    """
    settings = {
        name: plain(value)
        for name, value in vars(args).items()
        if name not in _ELSEWHERE and not _is_default(name, value)
    }
    rule = args.rule
    settings["verify"] = rule.spec
    if is_own(rule.spec):
        settings["rule_source"] = source_digest(rule.spec)
    for name, value in rule.settings.items():
        if value != rule.options[name].default:
            settings[name] = plain(value)
    # Leave out the origin of each prompt, so that a run can continue after its prompts file has been moved.
    prompts = [dataclasses.astuple(dataclasses.replace(row, where="")) for row in rows]
    return settings | {"prompts": digest(repr(prompts).encode())}


def _is_default(name: str, value: object) -> bool:
    # Compare by identity, because 0 equals False but is a valid setting.
    return value is None or value is False or (name in _DEFAULTS and value == _DEFAULTS[name])


def to_row(completion: Completion, rule: str, run: JsonObject) -> JsonObject:
    """Return the row of a finished prompt, in the schema of docs/rows.md.

    Args:
      completion: completion of the prompt.
      rule: name of the rule in reports.
      run: settings that distinguish the row from rows of other runs; from `Job.run_of`.
    """
    request, metrics = completion.request, completion.metrics
    row = {
        "id": request.id,
        "prompt": request.prompt,
        "messages": request.messages,
        "text": completion.text,
        "prompt_tokens": request.prompt_tokens,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        **{name: getattr(metrics, name) for name in _METRICS},
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
        "rule": rule,
        "sampling": sampling(request),
        "run": run,
        "log_probs": completion.log_probs and _columns(completion.log_probs),
    }
    # If the prompt is given as token ids, keep the key `prompt`, with the value null.
    return {name: value for name, value in row.items() if value is not None or name == "prompt"}


def _columns(log_probs: TokenLogProbs) -> JsonObject:
    columns = log_probs._asdict()
    if not log_probs.top:  # no --top-log-probs
        del columns["top"], columns["processed_top"]
    return columns


def sampling(request: Request) -> JsonObject:
    """Return the settings of a request that are recorded in its row, in the schema of docs/rows.md."""
    return {name: getattr(request, name) for name in (*SAMPLING, "strict")}


def missing_rows(file: RowFile, requests: Sequence[Request]) -> list[int]:
    """Return the indices of the requests that have no row in the file. The rows may be in any order.

    Raises:
      MarsError: the file repeats a row, or contains a row of a different part of the run.
    """
    numbers_by_key: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        # Compare rows as JSON, which is how the file stores them.
        row_key = to_line(
            {"id": request.id, "prompt_tokens": request.prompt_tokens, "sampling": sampling(request)}
        )
        numbers_by_key.setdefault(row_key, []).append(number)
    for line, row in enumerate(file.rows, start=1):
        row_key = to_line({name: row.get(name) for name in ("id", "prompt_tokens", "sampling")})
        if not numbers_by_key.get(row_key):
            raise MarsError(
                f"line {line} of '{file.path}' repeats another line or belongs to another --part: remove the line, or "
                "choose another --output."
            )
        # Identical requests share a key, and each row in the file accounts for one of them.
        numbers_by_key[row_key].pop(0)
    return sorted(itertools.chain.from_iterable(numbers_by_key.values()))


def fingerprints(session: Session, draft: DraftSpec) -> dict[str, str]:
    """Return the fingerprint of every component that has weights. All processes of a mesh must call it.

    Args:
      session: the session, with its weights.
      draft: spec of the drafter.
    """
    target, drafter, rule = session.target, session.drafter, session.loaded_rule
    fingerprint_by_component = {"target": fingerprint(target.params, target.path)}
    if draft.path:
        checkpoints = [resolve(draft.checkpoint, weights=False)] if draft.checkpoint else []
        fingerprint_by_component["draft"] = fingerprint(drafter.params, *checkpoints)
    if jax.tree.leaves(rule.params):
        fingerprint_by_component["rule"] = fingerprint(rule.params)
    return fingerprint_by_component
