"""Shared fixtures: tiny random checkpoints and one finished benchmark of them."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mars_jax.lab.commands import benchmark
from mars_jax.lab.evaluate import answers
from tests.cli.conftest import write_checkpoint

PROMPTS = ["the sea", "a story", "of the sun", "and the"]
TIMES = {"date", "seconds", "tokens_per_second", "speedup", "seconds_per_task", "task_speedup"}


def call(*argv):
    """Run the command and return its exit code."""
    return benchmark.main([str(arg) for arg in argv])


def timeless(value):
    """Return a JSON value without its times."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("evaluate") / "target", seed=0)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Write a scored jsonl task of four prompts."""
    pytest.importorskip("rouge_score")
    file = tmp_path_factory.mktemp("evaluate") / "prompts.jsonl"
    rows = [{"prompt": p, "metric": "rouge_l", "reference": "a b c d e the sea sun"} for p in PROMPTS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def flags(target, prompts):
    """Return the flags of the benchmark except the output. The target drafts for itself, so only sampling matters."""
    return [
        *("--target", target, "--draft", f"model:{target}", "--num-draft-tokens", 2),
        *("--task", f"jsonl={prompts}", "--max-new-tokens", 12, "--batch-size", 2, "--thetas", 0.9, 0.5),
        *("--temperatures", 1, "--controls", "all"),
    ]


def dying_after(groups: int, run=answers._decoded):
    """Return a version of `answers._decoded` that is interrupted after the given number of groups of problems."""
    remaining = iter(range(groups))

    def interrupted(*args, **options):
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        return run(*args, **options)

    return interrupted


class Folder(NamedTuple):
    """The files of a finished run."""

    path: Path
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    progress: Sequence[tuple[int, int, str]] = ()  # (done, total, text) of each call


def read_folder(path: Path) -> Folder:
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    return Folder(path, rows, json.loads((path / "summary.json").read_text()))


@pytest.fixture(scope="session")
def finished(flags, tmp_path_factory):
    """Return the files of one uninterrupted run."""
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("evaluate") / "finished"
    calls = []
    ticks = contextlib.nullcontext(lambda *call: calls.append(call))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(benchmark, "progress", lambda name: ticks)
        assert call(*flags, "--output", path) == 0
    return read_folder(path)._replace(progress=calls)
