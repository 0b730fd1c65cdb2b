"""Kill commands at random times, run them again, and compare their results with those of an uninterrupted run.

    python -m scripts.checks.kills --times 20
    python -m scripts.checks.kills --times 10 --signals KILL INT --results interrupts.json

Every command uses the embedded family. Apart from times, the results must be identical. A command that receives INT or
TERM must also print exactly one line that names the signal, and end with the signal's exit code. The script ends with
exit code 1 if a command fails one of these checks. Writes scripts/results/kills.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.lab.training.loop import CHECKPOINTS
from scripts import common

RESULTS = common.RESULTS / "kills.json"
TIMES = {
    "date",
    "seconds",
    "tokens_per_second",
    "speedup",
    "seconds_per_task",
    "task_speedup",
    "tokens_per_s",
}
"""Fields that differ between any two runs."""
EARLIEST = {signal.SIGKILL: 1.0, signal.SIGINT: 0.15, signal.SIGTERM: 0.15}
"""Earliest time of each signal, in seconds. Python needs this time to start; a SIGKILL during imports tests nothing."""
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""First word of the line on stderr that reports the signal."""
CHAIN = 5
"""Maximum number of times that a command is killed before it runs to its end."""


class Command(NamedTuple):
    """A command line, with {} in place of the folder, and the output that exists only once the command has finished."""

    name: str
    argv: str
    output: str | None = None


def timeless(value: Any) -> Any:
    """Return a JSON value without its times, speedups and intervals of speedups."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES and not k.startswith("speedup")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def results(folder: Path) -> dict[str, Any]:
    """Return the contents of files by path: rows and JSON without times, digests of weights, None for other files."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or CHECKPOINTS in path.parts:
            continue
        if path.suffix == ".jsonl":
            contents[name] = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".json":
            contents[name] = timeless(json.loads(path.read_text()))
        elif path.suffix == ".safetensors":
            contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            contents[name] = None
    return contents


def commands(data: Path) -> list[Command]:
    """Return the commands to kill, and write their input files into `data`."""
    prompts, text = data / "prompts.txt", data / "text.txt"
    prompts.write_text("".join(f"Once upon a time there were {i} bears, who\n" for i in range(24)))
    story = "Once upon a time, there was a little girl named Lily. She liked the sun, the sea and sand number"
    text.write_text("\n<|endoftext|>\n".join(f"{story} {i}." for i in range(200)))
    short = "--max-new-tokens 24 --task arithmetic --chat"
    return [
        Command(
            "generate",
            f"--prompts-file {prompts} --output {{}}/rows.jsonl --resume --batch-size 3 --temperature 1 "
            "--max-new-tokens 32",
        ),
        Command("benchmark", f"{short} --problems 4 --batch-size 2 --temperatures 1 --output {{}}/out"),
        Command(
            "calibrate",
            f"{short} --problems 12 --batch-size 3 --bound 0.9 --confidence 0.5 --thetas 0.9 0.7 "
            "--output {}/theta.json",
            "theta.json",
        ),
        Command(
            "distill",
            f"medusa --heads 1 --data {text} --output {{}}/made --tokens 6720 --step-tokens 64 --length 32 "
            "--write 64",
            "made",
        ),
        Command("convert", "tiny/target {}/made --dtype int8", "made"),
    ]


def run(
    command: Command, folder: Path, *, kill_after: float | None = None, number: int = signal.SIGKILL
) -> dict[str, Any] | None:
    """Run a command, send it a signal after `kill_after` seconds, and wait until it has ended.

    Return how the command reacted to the signal, or None if it ended before the signal. No process is left running.
    """
    argv = [sys.executable, "-m", "mars_jax", command.name, *command.argv.format(folder).split()]
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, stdout=file, stderr=file, start_new_session=True, preexec_fn=heed_interrupts
        )
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            early = not catches(process.pid, signal.SIGTERM)
            began = time.monotonic()
            os.killpg(process.pid, number)
            process.wait()
            seconds = time.monotonic() - began
            text = log.read_text(errors="replace")
            word = WORDS.get(signal.Signals(number))
            in_order = process.returncode == (128 + number if word else -number)
            if word:
                in_order &= sum(line.startswith(word) for line in text.splitlines()) == 1
                in_order &= "Traceback" not in text
            if not (in_order or early):
                print(f"{command.name} ended with {process.returncode}: {text}", file=sys.stderr)
            return {"seconds": round(seconds, 3), "early": early, "in_order": in_order}
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}: see {log}")
    return None


def heed_interrupts() -> None:
    """Restore the SIGINT handler. Background processes of a shell ignore SIGINT, and their children inherit this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; a command that handles signals has one for SIGTERM."""
    status = Path(f"/proc/{process}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def attack(
    command: Command, work: Path, times: int, numbers: Sequence[signal.Signals], rng: random.Random
) -> dict[str, Any]:
    """Kill a command `times` times, up to `CHAIN` times per run, and compare its results with an uninterrupted run's.

    The kills cycle through the signals.
    """
    undisturbed = work / f"{command.name}-undisturbed"

    def finished(folder: Path) -> bool:
        return command.output is not None and (folder / command.output).exists()

    for _ in range(2):  # the first run compiles, the second is timed
        shutil.rmtree(undisturbed, ignore_errors=True)
        undisturbed.mkdir(parents=True)
        began = time.monotonic()
        run(command, undisturbed)
        seconds = time.monotonic() - began
    expected, moments, endings, runs, differing = results(undisturbed), [], [], 0, []
    while len(moments) < times:
        folder = work / f"{command.name}-{runs}"
        folder.mkdir()
        last_kill = min(times, len(moments) + CHAIN)
        while len(moments) < last_kill:
            number = numbers[len(moments) % len(numbers)]
            moment = rng.uniform(EARLIEST[number], max(seconds, EARLIEST[number]))
            if finished(folder):
                break
            if (ending := run(command, folder, kill_after=moment, number=number)) is None:
                break
            moments.append(round(moment, 2))
            endings.append(ending)
            text = f"{command.name}: kill {len(moments)} at {moment:.1f} of {seconds:.1f} s"
            print(text, file=sys.stderr, flush=True)
        if not finished(folder):
            run(command, folder)
        if results(folder) != expected:
            differing.append(runs)
        else:
            shutil.rmtree(folder)
        runs += 1
    return {
        "signals": [number.name for number in numbers], "endings": endings,
        "command": command.name, "seconds": round(seconds, 1), "kills": len(moments), "runs": runs,
        "equal": runs - len(differing), "moments": moments, "differing": differing, "made": common.provenance(),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the attack; return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--times", type=int, default=20, help="kills of each command (default: %(default)s)")
    parser.add_argument(
        "--signals", choices=("KILL", "INT", "TERM"), nargs="+", default=["KILL"], help="default: KILL"
    )
    parser.add_argument("--only", nargs="+", metavar="COMMAND", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kill times")
    parser.add_argument("--work", type=Path, help="folder to work in (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    args = parser.parse_args(argv)
    numbers = [signal.Signals[f"SIG{name}"] for name in args.signals]
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        selected = [c for c in commands(work) if args.only is None or c.name in args.only]
        rows = [
            attack(c, work, args.times, numbers, random.Random(f"{args.seed} {c.name}")) for c in selected
        ]
    earlier = json.loads(args.results.read_text()) if args.results.exists() else []
    unchanged = [row for row in earlier if row["command"] not in {row["command"] for row in rows}]
    common.write(args.results, [*unchanged, *rows])
    failed = any(row["differing"] for row in rows)
    for row in rows:
        print(f"{row['command']:<12} {row['kills']:>3} kills, {row['equal']} of {row['runs']} runs equal")
        late = [ending for ending in row["endings"] if not ending["early"]]
        if late:
            in_order = sum(ending["in_order"] for ending in late)
            slowest = max(ending["seconds"] for ending in late)
            print(f"  {in_order} of {len(late)} in order, the slowest in {slowest:.2f} s")
            failed = failed or in_order < len(late)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
