"""Flags: their values, their defaults and a help that does not load jax."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import pytest

from mars_jax import __version__, drafters, verify
from mars_jax.cli.generate.arguments import DTYPES, MARGINS, parse
from mars_jax.cli.generate.command import main
from mars_jax.cli.settings import SETTINGS, DynamicTree
from mars_jax.hub.load import DTYPES as OF_HUB


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--temperature", "-0.1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "warm"),
        ("--temperature", "1e39"),
        ("--top-k", "-1"),
        ("--top-k", "1.5"),
        ("--top-k", "3000000000"),
        ("--top-p", "0"),
        ("--top-p", "1.01"),
        ("--top-p", "nan"),
        ("--min-p", "-0.5"),
        ("--min-p", "2"),
        ("--theta", "0"),
        ("--theta", "-1"),
        ("--theta", "nan"),
        ("--theta", "no-such-file.json"),
        ("--tau", "0.5"),
        ("--tau", "nan"),
        ("--max-relaxed-run", "-1"),
        ("--seed", "-1"),
        ("--seed", "4294967296"),
        ("--max-new-tokens", "0"),
        ("--num-draft-tokens", "0"),
        ("--num-draft-tokens", "129"),
        ("--batch-size", "0"),
        ("--tree", "4-0"),
        ("--tree", "4,2"),
        ("--tree", "-"),
        ("--tree", "32-32-32"),
        ("--tree", "dynamic:"),
        ("--tree", "dynamic:8-6"),
        ("--tree", "dynamic:8-6-40-1"),
        ("--tree", "dynamic:0-6-40"),
        ("--tree", "dynamic:8-6-1"),
        ("--tree", "dynamic:8-6-2000"),
        ("--tree", "dynamic:64-64-40"),
        ("--tree", "static:4-2"),
        ("--tree", ":4-2"),
        ("--draft-stop", "-0.1"),
        ("--draft-stop", "nan"),
    ],
)
def test_a_value_out_of_range_is_named(refused, flag, text):
    message = refused("--target", "nowhere", f"{flag}={text}", "hello")
    assert message.startswith(f"error: {flag} is {text}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--verify", "fast", "x"], "--verify: invalid choice: 'fast'"),
        (["--dtype", "int4", "x"], "--dtype: invalid choice"),
        (["--margin", "wide", "x"], "--margin: invalid choice"),
        (["--no-such-flag", "x"], "unrecognized arguments: --no-such-flag"),
        (["--temp", "1", "x"], "unrecognized arguments: --temp"),
        (["--theta"], "--theta: expected one argument"),
        (
            ["--draft", "eagle", "x"],
            "--draft is eagle: expected none, ngram, model:PATH, eagle:PATH or medusa:PATH",
        ),
        (["--draft", "medusa:", "x"], "--draft is medusa:: expected"),
        (["--draft", "lookahead:heads", "x"], "--draft is lookahead:heads: expected"),
        (["--draft", "model:", "x"], "--draft is model:: expected"),
        (["--draft", "ngram:3", "x"], "--draft is ngram:3: expected"),
    ],
)
def test_an_unknown_flag_or_choice_is_one_sentence(refused, argv, message):
    assert message in refused("--target", "nowhere", *argv)


def test_what_must_be_given_is_asked_for(refused, tmp_path):
    assert "there are no prompts" in refused()
    assert "there are no prompts" in refused("--target", "nowhere")
    file = tmp_path / "p.txt"
    file.write_text("hello\n")
    assert "give one of the two" in refused("--target", "nowhere", "hello", "--prompts-file", file)


def test_nothing_given_is_none_or_false_but_for_the_models():
    values = {name: value for name, value in vars(parse([])).items() if value not in (None, False)}
    assert values == {"prompts": [], "target": "tiny/target", "draft": "model:tiny/draft"}


def test_choices_are_those_of_the_library():
    assert tuple(verify.MARGINS) == MARGINS
    assert OF_HUB == DTYPES


def test_trees_are_static_or_dynamic():
    assert parse(["--tree", "4-2-2-1"]).tree == (4, 2, 2, 1)
    assert parse(["--tree", "dynamic:8-6-40"]).tree == DynamicTree(top_k=8, depth=6, nodes=40)
    # Without sizes they are the library's, which this module must not import.
    assert dataclasses.asdict(drafters.Dynamic()) == parse(["--tree", "dynamic"]).tree._asdict()


def test_every_setting_says_what_it_expects():
    for setting in SETTINGS.values():
        assert setting.expected and not setting.expected.endswith(".")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_go_to_stdout(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert ("--prompts-file" if flag == "--help" else f"mars-jax {__version__}") in capsys.readouterr().out


def test_help_is_immediate():
    began = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "mars_jax.generate", "--help"], capture_output=True, check=True
    )
    # Takes 0.1 s; the margin is for a busy machine, and still far from what importing jax takes on one.
    assert time.perf_counter() - began < 1.5
    assert b"examples:" in run.stdout and not run.stderr


def test_bad_flags_do_not_load_jax():
    code = (
        "import sys; from mars_jax.generate import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    )
    argv = ["--target", "x", "--theta", "0.5", "--verify", "exact", "hello"]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)
