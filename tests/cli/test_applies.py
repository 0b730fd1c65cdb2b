"""Flags without effect: they are refused by name, with the fix."""

import json

import pytest

from mars_jax.cli.commands import parser_of
from mars_jax.cli.flags import OF_DRAFT, WITH, WITHOUT
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.prompts import CONSTRAINTS, from_texts, read_prompts
from mars_jax.utils.settings import REQUEST

MODEL = "--draft model:small"
SIMULATED = f"{MODEL} --verify simulated --tau 2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--verify exact --theta 0.9", "--theta does not apply to the rule exact, which has no settings"),
        ("--block", "--block does not apply to the rule mars, which has theta, margin, base,"),
        ("--verify mars --rule-option block=true", "--rule-option block does not apply to the"),
        ("--draft none --verify rejection", "--verify rejection does not apply to --draft none"),
        ("--draft none --num-draft-tokens 4", "--num-draft-tokens does not apply to --draft none"),
        ("--draft-size auto --theta 0.9", "--draft-size auto does not apply to the rule mars"),
        ("--draft-size auto --draft none", "--draft-size auto does not apply to --draft none"),
        (f"{MODEL} --draft-size auto --tree 2-2", "--draft-size auto does not apply with --tree"),
        ("--head-embed target", "--head-embed does not apply to --draft ngram, which has no embedding"),
        ("--any-rule", "--any-rule does not apply without --draft-size auto or --refine"),
        ("--verify exact --draft-size auto --any-rule", "--any-rule does not apply to the"),
        ("--refine x.txt", "--refine does not apply to --draft ngram"),
        (f"{MODEL} --verify mars --refine x.txt", "--refine does not apply to the rule mars"),
        (f"{MODEL} --refine x.txt --output y --resume", "--refine does not apply with --resume"),
        (f"{MODEL} --refine-every 4", "--refine-every does not apply without --refine"),
        ("--tree 2-2", "--tree does not apply to --draft ngram"),
        (f"{MODEL} --tree 2-2 --num-draft-tokens 2", "--num-draft-tokens does not apply with"),
        (f"{MODEL} --tree 2-2 --verify rejection --block", "--tree does not apply to the rule rejection by"),
        ("--draft eagle:head --tree dynamic --base rejection --block", "--tree does not apply to the rule"),
        ("--draft medusa:heads --tree 2-2 --verify cactus", "--tree does not apply to the rule cactus"),
        ("--draft medusa:heads --tree dynamic", "--tree dynamic does not apply to --draft medusa:PATH"),
        ("--draft-device 1", "--draft-device does not apply to --draft ngram: leave it out, or draft"),
        ("--draft-device 1,x", "--draft-device is '1,x': expected one device number"),
        (f"{MODEL} --draft-device 1 --tree 2-2", "--draft-device does not apply with --tree"),
        (f"{MODEL} --draft-device 1 --verify rejection", "--draft-device does not apply to"),
        (f"{MODEL} --draft-device 1 --compare", "--draft-device does not apply with --compare"),
        (f"{MODEL} --draft-device 1 --regex a+", "--draft-device does not apply with constrained text"),
        ("--draft-stop 1", "--draft-stop does not apply to --draft ngram"),
        ("--top-p 0.9", "--top-p does not apply at temperature 0"),
        ("--min-p 0.1 --temperature 0", "--min-p does not apply at temperature 0"),
        ("--theta 1.5", "--theta is 1.5: expected a number above 0 and at most 1 for the margin ratio"),
        ("--resume", "--resume does not apply without --output"),
        ("--part 0/1", "--part does not apply without --output, the file of its rows"),
        ("--num-processes 2", "--num-processes does not apply without --mesh"),
        ("--relax-constrained", "--relax-constrained does not apply without --regex, --json-schema"),
        ("--system x", "--system does not apply without --chat or messages, which have a chat"),
        ("--stream --json", "--stream does not apply with --json"),
        ("--stream --output rows.jsonl", "--stream does not apply with --output"),
        ("--compare --verify exact", "--verify does not apply with --compare"),
        ("--compare --base exact", "--base does not apply with --compare"),
        ("--compare --stream", "--stream does not apply with --compare"),
        ("--compare --no-stream", "--no-stream does not apply with --compare"),
        ("--compare --output rows.jsonl", "--output does not apply with --compare"),
        ("--compare --resume", "--resume does not apply with --compare"),
        ("--compare --draft none", "--compare does not apply to --draft none"),
        (f"{MODEL} --verify simulated", "--verify simulated needs a --tau"),
        ("--verify simulated --tau 2", "--verify simulated does not apply to --draft ngram,"),
        (f"{SIMULATED} --draft-stop 1", "--draft-stop does not apply to --verify simulated"),
    ],
)
def test_a_flag_that_does_not_apply_is_refused(refused, flags, message):
    assert refused("--target", "nowhere", *flags.split(), "hello").startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"theta": 0.5}, "--verify exact", "theta does not apply to the rule exact, which has no"),
        ({"draft_stop": 0.5}, "", "draft_stop does not apply to --draft ngram"),
        ({"tau": 2}, "--verify mars", "tau does not apply to the rule mars, which has theta, "),
        ({"margin": "gap"}, "--verify mars", "margin is the same for all prompts: leave it out, and give"),
        ({"theta": 2}, "--verify mars", "theta is 2.0: expected a number above 0 and at most 1 for the"),
        ({"strict": True}, "--verify exact", "strict does not apply to the rule exact, which relaxes"),
        ({"draft_stop": 1}, SIMULATED, "draft_stop does not apply to --verify"),
        ({"top_p": 0.5}, "", "top_p does not apply at temperature 0"),
        ({"top_k": 5, "temperature": 0}, "--temperature 1", "top_k does not apply at temperature 0"),
    ],
)
def test_a_setting_of_a_row_that_does_not_apply_is_refused(refused, tmp_path, row, flags, message):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b"} | row) + "\n")
    sentence = refused("--target", "nowhere", "--prompts-file", file, *flags.split())
    assert f"p.jsonl, line 2: {message}" in sentence


def test_the_tables_name_flags_and_keys_that_there_are():
    commands = ("generate", "benchmark", "calibrate")
    actions = [action for name in commands for action in parser_of(name)._actions]
    flags = {flag: action for action in actions for flag in action.option_strings}
    keys = {*REQUEST, *CONSTRAINTS, "messages", "prompt_tokens"}
    named = [name for names, *_ in (*WITHOUT, *WITH, *OF_DRAFT) for name in names]
    named += [name for _, others, _ in (*WITHOUT, *WITH) for name in others]
    for name in named:
        flag, _, value = name.partition(" ")
        assert flag in (flags if flag.startswith("--") else keys), name
        assert not value or value in flags[flag].choices


def test_a_chat_of_token_ids_is_refused(refused, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_tokens": [1, 2]}\n')
    message = refused("--target", "nowhere", "--prompts-file", file, "--chat")
    assert "line 1: prompt_tokens does not apply with --chat" in message


def plan(*argv):
    return check_flags(parse([*argv, "hello"]), from_texts(["hello"]))


def test_text_streams_unless_it_is_switched_off():
    assert plan().streams
    for flags in (["--no-stream"], ["--json"], ["--output", "x"], ["--compare"]):
        assert not plan(*flags).streams


def test_sampling_flags_apply_where_a_row_samples(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "temperature": 1}\n{"prompt": "b"}\n')
    args = parse(["--top-p", "0.9", "--seed", "3"])
    check_flags(args, read_prompts(str(file), args.rule))
