"""The commands of `python -m mars_jax` and `mars-jax`."""

import importlib.util
import json
from pathlib import Path

import pytest

from mars_jax import __version__
from mars_jax.cli import commands
from mars_jax.drafters.registry import definitions
from mars_jax.verify import rules

ROOT = Path(__file__).parent.parent.parent


def call(capsys, *argv):
    """Return (exit code, stdout, stderr) of a command line."""
    capsys.readouterr()
    try:
        code = commands.main(list(argv))
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def parsers():
    """Return the parser of each command and kind of command, by its words."""
    by_words = {}
    for name in commands.COMMANDS:
        if (parser := commands.parser_of(name)) is not None:
            by_words[name,] = parser
            by_words |= {(name, kind): subparser for kind, subparser in parser.kinds().items()}
    return by_words


def test_without_a_name_all_are_listed(capsys):
    for argv in ([], ["--help"], ["-h"]):
        code, out, _ = call(capsys, *argv)
        assert code == 0
        for name, description in commands.COMMANDS.items():
            assert f"  {name} " in out and description in out


@pytest.mark.parametrize("name", [None, *commands.COMMANDS])
def test_every_command_says_its_version(capsys, name):
    code, out, _ = call(capsys, *([name] if name else []), "--version")
    assert code == 0 and out == f"mars-jax {__version__}\n"


@pytest.mark.parametrize("name", [name for name in commands.COMMANDS if name != "lm_eval"])
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit):
        commands.main([name, "--help"])
    assert "usage: " in capsys.readouterr().out


def test_every_help_fits_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    helps = [parser.format_help() + parser.format_short() for parser in parsers().values()]
    lines = "".join(helps).splitlines()
    assert len(lines) > 500 and [line for line in lines if len(line) > 80] == []


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_a_harness_that_is_missing_is_one_sentence(capsys):
    code, out, err = call(capsys, "lm_eval", "--tasks", "x")
    assert (code, out) == (2, "")
    assert err == "error: the package lm-eval is not installed: pip install lm-eval.\n"


# The tables.


def test_the_table_of_rules_is_json(capsys):
    code, out, _ = call(capsys, "generate", "--list-rules", "--json")
    assert code == 0 and [row["name"] for row in json.loads(out)] == list(rules())
    by_name = {row["name"]: row for row in json.loads(out)}
    assert by_name["exact"]["lossless"] and by_name["rejection"]["needs"] == ["draft", "q"]
    tau = by_name["simulated"]["settings"][0]
    assert (tau["name"], tau["default"], tau["range"]["low"], tau["per_row"]) == ("tau", None, 1, True)


def test_the_table_of_rules_is_for_people_too(capsys):
    code, out, err = call(capsys, "generate", "--list-rules")
    assert (code, err) == (0, "")
    text = " " + " ".join(out.split())
    for row in rules().values():
        assert f"{row.name}: {row.help}\n  {'lossless' if row.lossless else 'lossy'}" in out
        assert row.paper in text
        for setting in row.settings.values():
            assert f" {setting.name}: {setting.help}" in text
    assert "a number above 0 for the margin gap (inf is strict); " in text and "default: any" in text
    assert max(map(len, out.splitlines())) < 130


def test_a_rule_of_ones_own_joins_the_table_when_it_is_named(capsys, tmp_path):
    file = tmp_path / "gates.py"
    file.write_text("def gate(entropy: float = 1.5):\n    'High entropy relaxes.'\n")
    code, out, _ = call(capsys, "generate", "--list-rules", "--json", "--verify", f"{file}:gate")
    row = json.loads(out)[-1]
    assert code == 0 and (row["name"], row["help"]) == ("gate", "High entropy relaxes")
    assert [(s["name"], s["type"], s["default"]) for s in row["settings"]] == [("entropy", "float", 1.5)]


def test_the_table_of_drafters(capsys):
    code, out, _ = call(capsys, "generate", "--list-drafters")
    assert code == 0 and all(f"{row.spec}: {row.help}" in out for row in definitions().values())
    code, out, _ = call(capsys, "generate", "--list-drafters", "--json")
    assert code == 0 and [row["name"] for row in json.loads(out)] == list(definitions())


# Empty values.


@pytest.mark.parametrize("form", ["two words", "one word"])
def test_an_empty_value_of_any_flag_of_any_command_is_one_sentence(capsys, form):
    """Test the arguments that `--target "$UNSET"` passes."""
    actions = [(words, action) for words, parser in parsers().items() for action in parser._actions]
    for words, action in actions:
        if not action.option_strings or action.nargs == 0:
            continue
        flag = action.option_strings[-1]
        code, out, err = call(capsys, *words, *([flag, ""] if form == "two words" else [f"{flag}="]))
        assert (code, out) == (2, ""), (words, flag)
        assert err.startswith(f"error: {flag} is empty; a shell variable may be unset: give"), words
        assert err.count("\n") == 1


# Misspelt names.


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["generat"], "generate"),
        (["generate", "--temprature", "1", "x"], "--temperature"),
        (["generate", "--theta=1", "--max-token=5", "x"], "--max-new-tokens"),
        (["generate", "--draft", "eagel:x", "x"], "eagle"),
        (["generate", "--verify", "rejecton", "x"], "rejection"),
        (["generate", "--margin", "gapp", "x"], "gap"),
        (["generate", "--dtype", "bfloat", "x"], "bfloat16"),
        (["generate", "--rule-option", "tehta=1", "x"], "theta"),
        (["distill", "eagle", "--output", "x"], "eagle3"),
        (["distill", "eagle3", "--output", "x", "--draft-vocap", "9"], "--draft-vocab"),
        (["benchmark", "--task", "arithmetics", "--output", "x", "--problem", "1"], "--problems"),
        (["benchmark", "--task", "gsm8", "--output", "x"], "gsm8k"),
    ],
)
def test_a_misspelt_name_gets_a_hint(capsys, argv, meant):
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "") and f"(did you mean {meant}?)" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--xyzzy"], ["--draft", "ngram:3"], ["--verify", "typical", "--theta", "1"]]
)
def test_an_unknown_name_without_similar_ones_gets_no_hint(capsys, flags):
    assert "did you mean" not in call(capsys, "generate", *flags, "x")[2]
