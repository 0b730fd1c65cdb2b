"""Flags: values, defaults, and help that does not load jax."""

import re

import pytest

from mars_jax import drafters
from mars_jax.cli.generate.arguments import parse, parser
from mars_jax.cli.generate.command import main

OUT_OF_RANGE = """
--temperature=-0.1 --temperature=nan --temperature=warm --temperature=1e39 --top-k=1.5 --top-k=3000000000 --top-p=0
--min-p=2 --theta=-1 --theta=no-such-file.json --max-relaxed-run=-1 --seed=4294967296 --max-new-tokens=0
--num-draft-tokens=129 --batch-size=0 --draft-stop=nan --tree=4-0 --tree=4,2 --tree=- --tree=32-32-32
--tree=dynamic: --tree=dynamic:8-6 --tree=dynamic:0-6-40 --tree=dynamic:8-6-2000 --tree=static:4-2
"""


@pytest.mark.parametrize("argument", OUT_OF_RANGE.split())
def test_a_value_out_of_range_is_named(refused, argument):
    flag, _, text = argument.partition("=")
    assert refused("--target", "nowhere", argument, "hello").startswith(f"error: {flag} is {text}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--verify", "fast", "x"], "there is no rule 'fast': choose one of exact, rejection, mars"),
        (["--verify", "simulated", "--tau=0.5", "x"], "--tau is 0.5: expected a number of at"),
        (["--dtype", "int2", "x"], "--dtype: invalid choice"),
        (["--margin", "wide", "x"], "--margin is wide: expected one of ratio, gap"),
        (["--rule-option", "theta", "x"], "--rule-option is theta: expected NAME=VALUE"),
        (["--chat", "--template-arg", "x", "The"], "--template-arg is 'x': expected NAME=VALUE"),
        (["--regex", "a(", "x"], "the pattern 'a(' is not a regular expression"),
        (["--rule-option", "theta=2", "x"], "--rule-option theta is 2: expected a number above 0"),
        (["--rule-option", "fast=2", "x"], "--rule-option fast does not apply to the rule mars, which has"),
        (["--rule-option", "theta=1", "--theta", "1", "x"], "--rule-option theta=1 is given twice, also as"),
        (["--verify", "learned", "x"], "the rule learned needs weights: name them, as learned:PATH"),
        (["--verify", "mars:x", "x"], "the rule is mars:x: mars has no weights, so give only its name"),
        (["--verify", "nowhere.py:gate", "x"], "the file of a rule 'nowhere.py' cannot be read"),
        (["--list-rules", "x"], "take no prompts"),
        (["--list-rules", "--list-drafters"], "not allowed with"),
        (["--temp", "1", "x"], "unrecognized arguments: --temp"),
        (["--theta"], "--theta: expected one argument"),
        (["--draft", "eagle", "x"], "--draft is eagle: expected none, ngram, model:PATH, eagle:PATH,"),
        (["--draft", "model:", "x"], "--draft is model:: expected"),
        (["--draft", "ngram:3", "x"], "--draft is ngram:3: expected"),
    ],
)
def test_an_unknown_flag_or_choice_is_one_sentence(refused, argv, message):
    assert message in refused("--target", "nowhere", *argv)


def test_negative_numbers_are_values():
    args = parse(["--presence-penalty", "-1e-3", "--frequency-penalty", "-2", "x"])
    assert (args.presence_penalty, args.frequency_penalty, args.prompts) == (-1e-3, -2.0, ["x"])


def test_what_must_be_given_is_asked_for(refused, tmp_path):
    assert "there are no prompts" in refused()
    file = tmp_path / "p.txt"
    file.write_text("hello\n")
    assert "give one of the two" in refused("--target", "nowhere", "hello", "--prompts-file", file)


def test_nothing_given_is_none_or_false_but_for_the_models():
    values = {name: value for name, value in vars(parse([])).items() if value not in (None, False)}
    rule = values.pop("rule")
    assert values == {"prompts": [], "target": "tiny/target", "draft": "model:tiny/draft"}
    assert (rule.spec, dict(rule.settings)) == ("mars", {})


def test_trees_are_static_or_dynamic():
    assert parse(["--tree", "4-2-2-1"]).tree == (4, 2, 2, 1)
    assert parse(["--tree", "dynamic:8-6-40"]).tree == drafters.Dynamic(top_k=8, depth=6, nodes=40)
    assert parse(["--tree", "dynamic"]).tree == drafters.Dynamic()


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return a function that returns the output of a flag that exits, such as --help, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*flags):
        with pytest.raises(SystemExit) as caught:
            main(flags)
        assert caught.value.code == 0
        return capsys.readouterr().out

    return call


def flags_in(text):
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE))


def test_the_short_help_fits_one_screen(printed):
    text = printed("--help")
    lines = text.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80 and len(flags_in(text)) <= 30
    titles = [line for line in lines if re.fullmatch(r"\w+:", line)]
    assert titles == ["models:", "rule:", "sampling:", "input:", "output:", "examples:"]
    assert text.count("(") == text.count(")")  # help is cut only at sentence ends
    assert "--help-all explains all" in lines[-1]


def test_the_long_help_explains_every_flag(printed):
    text = printed("--help-all")
    flags = {flag for a in parser()._actions for flag in a.option_strings if flag.startswith("--")}
    assert flags_in(text) == {flag for flag in flags if not flag.startswith("--no-")} | {"--no-check"}
    assert "A prompts file" in text
