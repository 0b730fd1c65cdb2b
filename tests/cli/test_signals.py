"""Ctrl-C and SIGTERM: a command ends at once, with the exit code of the signal and one line on stderr."""

import logging
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import tomllib
from pathlib import Path

import pytest

from mars_jax.cli import commands
from tests.helpers import slow_but
from tests.helpers.shell import LAUNCHER, Shell

ROOT = Path(__file__).parent.parent.parent
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
SECONDS = 2.0
"""Maximum time from a signal to the end of the process."""


def run_and_signal(number, code, *argv, **environment):
    """Run code, send a signal once it prints "now", and return (exit code, stdout after that line, stderr)."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, "-c", code, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )
    with process:
        try:
            assert process.stdout is not None
            ready = "now\n" in process.stdout
            began = time.monotonic()
            process.send_signal(number)
            output = process.communicate(timeout=20)
            seconds = time.monotonic() - began
        finally:
            process.kill()
    assert ready, output
    assert seconds < SECONDS
    return process.returncode, *output


# Print a line when the import of a module begins, then block the main thread.
AT_IMPORT = """
import runpy, sys, time
module = sys.argv.pop(1)
class Busy:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            print("now", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Busy())
"""
ENTRIES = {
    "python -m mars_jax": 'runpy.run_module("mars_jax", run_name="__main__")',
    "python -m mars_jax.generate": 'runpy.run_module("mars_jax.generate", run_name="__main__")',
    "mars-jax": "from mars_jax.__main__ import main; sys.exit(main())",
}


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_handles_signals_before_it_is_imported(name):
    code = AT_IMPORT + ENTRIES["python -m mars_jax"]
    assert run_and_signal(signal.SIGINT, code, commands._HOME[name], name) == (130, "", "interrupted\n")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("number", WORDS)
def test_every_entry_point_handles_signals_before_it_imports_commands(entry, number):
    outcome = run_and_signal(number, AT_IMPORT + ENTRIES[entry], "mars_jax.cli.commands")
    assert outcome == (128 + number, "", f"{WORDS[number]}\n")


def test_the_console_script_is_the_entry_point_that_handles_signals():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"mars-jax": "mars_jax.__main__:main"}


# Print a line from another thread as soon as the command starts the given activity.
AT_ACTIVITY = """
import re, runpy, sys, threading, time
from mars_jax.utils import activity
doing = sys.argv.pop(1)
def wait():
    while not re.search(doing, activity.describe() or ""):
        time.sleep(0.01)
    print("now", flush=True, file=sys.__stdout__)
threading.Thread(target=wait, daemon=True).start()
runpy.run_module("mars_jax", run_name="__main__")
"""


@pytest.mark.parametrize("doing", slow_but(["compiling", "^loading", r"^prompts: \d"], "compiling"))
def test_a_command_that_is_busy_in_xla_is_interrupted(doing):
    argv = ["generate", "--no-stream", "--draft", "none", "--max-new-tokens", "200", "--ignore-eos"]
    argv += ["--batch-size", "1", *["Once upon a time"] * 9]
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    code, _, errors = run_and_signal(signal.SIGINT, AT_ACTIVITY, doing, *argv, **uncached)
    assert (code, errors) == (130, "interrupted\n")


HANDLES = """
import os, signal, sys, threading, time
from mars_jax.cli import signals
def send(number):
    os.kill(os.getpid(), number)
def wait():
    print("now", flush=True)
    time.sleep(60)
signals.handle()
"""
LOCK = 'lock = threading.Lock()\nlock.acquire()\nwith signals.ending(lambda: " with 3 rows"):\n    '
LOCK += 'print("now", flush=True)\n    lock.acquire()'
FAILS = 'with signals.ending(lambda: {}["rows"]):\n    wait()'
SECOND = "with signals.ending(wait):\n    send(signal.SIGTERM)\n    time.sleep(60)"
STOP = "with signals.stoppable() as stop:\n    send(signal.SIGINT)\n    assert stop.wait(10)\n"
# The signal comes after the mark has been read and before the main thread leaves the block.
LATE = "mark = signals._state.marked.wait\nsignals._state.marked.wait = lambda: (mark(), wait())\n"
LATE += "with signals.stoppable():\n    pass"
FORK = "child = os.fork()\nif not child:\n    send(signal.SIGTERM)\n    time.sleep(60)\n"
FORK += "assert os.waitpid(child, 0)[1] == signal.SIGTERM\ntime.sleep(0.2)\nwait()"
ENDINGS = {
    "an action runs while the main thread waits for a lock": (LOCK, " with 3 rows"),
    "an action that fails is part of the line": (FAILS, ": 'rows'"),
    "a second signal ends an action that takes long": (SECOND, ""),
    "a second signal ends a command whose reply was stopped": (f"{STOP}{STOP}    wait()", ""),
    "a signal comes right after a reply": (LATE, ""),
    "a signal of a forked child does not end the command": (FORK, ""),
}
"""For each situation: code after `HANDLES`, and the end of the line on stderr."""


@pytest.mark.parametrize("situation", ENDINGS)
def test_a_signal_ends_a_command_with_one_line(situation):
    code, end = ENDINGS[situation]
    assert run_and_signal(signal.SIGINT, HANDLES + code) == (130, "", f"interrupted{end}\n")


IGNORE = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
RAISE = "for _ in range(20):\n    try:\n        with signals.raising():\n            send(signal.SIGINT)\n"
RAISE += "            time.sleep(60)\n    except KeyboardInterrupt:\n        pass\n"
SURVIVED = {
    "ctrl-c at the prompt raises": f"{HANDLES}{RAISE}wait()",
    "the caller ignores the signal": f"{IGNORE}{HANDLES}send(signal.SIGINT)\nwait()",
}


@pytest.mark.parametrize("situation", SURVIVED)
def test_a_command_continues_after_a_signal(situation):
    assert run_and_signal(signal.SIGTERM, SURVIVED[situation]) == (143, "", "terminated\n")


AT_ENTRY = """
import logging, sys
sys.unraisablehook = lambda problem: print("hook", problem.exc_value)
from mars_jax.__main__ import main
from mars_jax.cli import commands
commands.main = lambda argv: 0
main()
class Failing:
    def __init__(self, text): self.text = text
    def __del__(self): raise RuntimeError(self.text)
Failing("Event loop is closed"); Failing("another")
print(logging.getLogger("absl").level == logging.CRITICAL)
from jax._src import distributed
print(distributed._ENABLE_PREEMPTION_SERVICE.value)
"""


def test_the_entry_point_quiets_libraries_and_keeps_the_previous_hook():
    process = subprocess.run([sys.executable, "-c", AT_ENTRY], capture_output=True, text=True, cwd=ROOT)
    assert process.stdout == "hook another\nTrue\nFalse\n", process.stderr


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_that_a_program_calls_keeps_its_handlers_hooks_and_log_levels(name, monkeypatch, capsys):
    def settings():
        levels = [logging.getLogger(logger).level for logger in ("absl", "concurrent.futures")]
        return [signal.getsignal(number) for number in WORDS], sys.unraisablehook, levels

    module = commands.importlib.import_module(commands._HOME[name])
    during, initial = [], settings()
    main, codes = module.main, []
    monkeypatch.setattr(module, "main", lambda argv: (during.append(settings()), main(argv))[1])

    def call():
        try:
            codes.append(commands.main([name, "--version"]))
        except SystemExit as exit:
            codes.append(exit.code)

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert codes == [0, 0] and during == [initial, initial] and settings() == initial


def test_the_terminal_is_as_the_command_found_it():
    code = HANDLES + 'import tty; tty.setraw(0); sys.stderr.write("\\x1b[?25l"); wait()'
    shell = Shell("-c", code)
    attributes = termios.tcgetattr(shell._terminal)
    shell.until("now")
    assert termios.tcgetattr(shell._terminal) != attributes
    os.kill(shell._process.pid, signal.SIGTERM)
    assert re.search(r"\x1b\[\?25h\r?\nterminated\r?\n", shell.until("terminated\r?\n"))
    assert termios.tcgetattr(shell._terminal) == attributes
    assert shell.wait() == 143
