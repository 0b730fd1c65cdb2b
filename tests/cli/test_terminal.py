"""Terminal output: colours only on terminals, unchanged text everywhere else."""

import io
import re
import subprocess
import sys
import types

import pytest

from mars_jax.cli.generate import terminal
from mars_jax.cli.generate.terminal import TextPrinter, console, statistics
from mars_jax.core.metrics import Metrics
from mars_jax.serve.requests import KINDS
from tests.helpers.shell import Shell, strip_escapes


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def ordinary_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def story(file, *, colours=True):
    printer = TextPrinter(console(file), colours=colours)
    for prompt in ("Once [b]", "Then"):
        printer.prompt(prompt, chat=False)
        for kind in KINDS:
            printer.piece(kind, f" {kind}")
        printer.end()
    return file.getvalue()


PLAIN = "Once [b] exact relaxed corrected trusted\n\nThen exact relaxed corrected trusted\n"


def test_a_file_gets_the_text_alone():
    assert story(io.StringIO()) == PLAIN


def test_a_terminal_tells_the_kinds_apart():
    text = story(Terminal())
    codes = {kind: text[: text.index(f" {kind}")].rpartition("\x1b")[2] for kind in terminal.STYLES}
    assert len(set(codes.values())) == len(KINDS)


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert story(Terminal()) == PLAIN


def test_a_file_gets_every_character():
    file, text = io.StringIO(), "word " * 200 + "\ttab\r\n\x0c [b] :smile:"
    TextPrinter(console(file), colours=True).piece("exact", text)
    assert file.getvalue() == text


def test_text_cannot_drive_the_terminal():
    file = Terminal()
    TextPrinter(console(file), colours=False).piece("exact", "\x1b[2Jgone\x07\ttab\n")
    assert file.getvalue() == "\N{REPLACEMENT CHARACTER}[2Jgone\N{REPLACEMENT CHARACTER}\ttab\n"


def test_statistics_count_what_was_drafted():
    metrics = Metrics(
        steps=2, emitted=6, proposed=8, accepted_exact=3, accepted_relaxed=1, depth_histogram=(0, 1, 0, 1), regret=0.6
    )  # fmt: skip
    text = statistics([types.SimpleNamespace(metrics=metrics)], 2.0, "mars", drafts=True)
    assert "6 tokens in 2.00 s, 3.0 tokens/s, 2 steps, rule mars" in text
    assert "tau 3.00 tokens per step with the correction or bonus token, 2.00 without" in text
    assert "drafted 8, accepted 4 (50.0%): 3 exact, 1 relaxed" in text
    assert "0: 0  1: 1  2: 0  3: 1" in text
    assert "regret 0.1000 nats" in text


def test_the_legend_fits_the_terminal():
    assert "\n" not in terminal.legend(120).plain
    assert terminal.legend(80).plain.split("\n") == terminal.legend(120).plain.split("   ")


PROMPT = "Once 猫は赤い😀 [b] upon"


def one_shot(target):
    flags = "--draft ngram --max-new-tokens 12 --ignore-eos"
    return f"-m mars_jax.generate --target {target} {flags}".split()


@pytest.mark.parametrize(("columns", "env"), [(30, {}), (30, {"TERM": "dumb"}), (80, {"NO_COLOR": "1"})])
@pytest.mark.slow
def test_a_text_in_a_real_terminal(target, columns, env):
    """Show colours if supported, wide characters and brackets unchanged, and the statistics after the text."""
    shell = Shell(*one_shot(target), PROMPT, columns=columns, **{"TERM": "xterm-256color"} | env)
    text = shell.until("regret [0-9.]+ nats")
    assert shell.wait() == 0
    assert PROMPT in strip_escapes(text) and "12 tokens in" in strip_escapes(text)
    assert bool(re.search(r"\x1b\[[0-9;]*m", text)) == (not env)
    assert ("corrected the target's own" in text.replace("\x1b[36m", "")) == (not env)


@pytest.mark.slow
def test_a_reader_that_has_had_enough_ends_the_command_without_a_word(target):
    """Close stdout after one line, as `| head -1` does."""
    command = [sys.executable, *one_shot(target), "--prompts-file", "-"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdin.write("a story\nthe sea\n" * 8)
        process.stdin.close()
        assert process.stdout.readline().startswith("a story")
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and "Traceback" not in errors and "error" not in errors
