"""Limits of `mars_jax.core.limits`: hostile names and sizes are refused in one sentence, before anything is allocated."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mars_jax.cli import commands
from mars_jax.cli.program import PATHS
from mars_jax.core.errors import MarsError

LONG_NAMES = {
    "a long name": "x" * 300,
    "a long name in a path": f"nowhere/{'x' * 300}/y",
    "a long path": "/".join(["x" * 100] * 60),
    "a NUL": "a\0b",
    "half a surrogate pair": "a\ud800b",
}
FORMS = {
    "DRAFT": ["model:{}", "eagle:{}", "medusa:{}", "dflash:{}", "sprinter:{}", "replay:{}"],
    "RULE": ["learned:{}", "{}.py:rule", "equivalent:{}"],
    "NAME[=PATH]": ["jsonl={}", "stories={}", "{}"],
    **dict.fromkeys([*PATHS, "NAME", "--theta", "--thetas", "--prompts-file"], ["{}"]),
}
"""Forms of a value that holds a path, by metavar or flag."""
NEEDED = {
    "benchmark": ["--task", "arithmetic", "--output", "made"],
    "calibrate": ["--task", "arithmetic", "--output", "made"],
    "compounding": ["--task", "arithmetic", "--output", "made"],
    "distill": ["--data", "texts", "--output", "made", "--target", "tiny/target"],
    "convert": ["tiny/target", "made"],
}
"""Valid values of arguments that a command requires."""
NAMED_BY_PLACE = {"source": 1, "destination": 2}
"""Places of arguments of `convert` in its line."""


def path_arguments():
    """Return (command, argument, form of its value) for every argument that may hold a path."""
    cases = []
    for name in commands.COMMANDS:
        parser = commands.parser_of(name)
        kinds = {} if parser is None else {name: parser, **{f"{name} {k}": p for k, p in parser.kinds().items()}}
        for words, one in kinds.items():
            for action in one._actions:
                argument = [action.dest, *action.option_strings][-1]
                for form in FORMS.get(argument, FORMS.get(str(action.metavar), [])):
                    cases.append((words, argument, form))
    return cases


@pytest.fixture(autouse=True)
def _no_waiting(tmp_path, monkeypatch):
    """Run in an empty folder, and fail after 10 seconds."""
    monkeypatch.chdir(tmp_path)

    def stop(*_):
        raise KeyboardInterrupt  # no handler takes it for an unreadable file

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("words, argument, form", path_arguments())
def test_no_argument_takes_a_name_that_no_file_can_have(words, argument, form, tmp_path, capsys):
    Path("texts").write_text("a story\n" * 100)
    for value in LONG_NAMES.values():
        argv = [*words.split(), *NEEDED.get(words.split()[0], [])]
        value = form.format(value)
        if argument.startswith("--"):
            argv += [argument, value]
        elif argument in NAMED_BY_PLACE:
            argv[NAMED_BY_PLACE[argument]] = value
        else:
            argv.append(value)
        assert commands.main(argv) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and err.splitlines()[-1].startswith("error: "), err
        assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
