"""Conversations: the ids of transformers' own template, in Python, prompts files and the command."""

from __future__ import annotations

import json
import shutil

import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.cli.generate.command import main

TEMPLATE = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% if not loop.last or m.role != 'assistant' %}
{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}
{%- endif %}"""
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi. How are you?"},
    {"role": "user", "content": "Well"},
]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The embedded target with a template that reads roles and a variable of its own."""
    path = tmp_path_factory.mktemp("chatty") / "target"
    shutil.copytree(hub.outline("tiny/target").path, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_a_conversation_has_the_ids_of_transformers(chatty):
    """System prompts, several turns, variables, and an answer to be continued."""
    target = hub.outline(str(chatty))

    def theirs(turns, **more):
        given = {"add_generation_prompt": True} | more
        return target.tokenizer.apply_chat_template(turns, return_dict=True, **given)["input_ids"]

    def ours(prompts, **more):
        return [list(made.prompt_tokens) for made in mj.make_requests(target, prompts, **more)]

    assert ours(TURNS) == ours([TURNS]) == [theirs(TURNS)]
    assert ours("Hello", chat=True, system="Be brief.") == [theirs([SYSTEM, TURNS[0]])]
    assert ours([[SYSTEM, *TURNS], TURNS], system="Sing.") == [
        theirs([SYSTEM, *TURNS]),
        theirs([{"role": "system", "content": "Sing."}, *TURNS]),
    ]
    quiet = {"enable_thinking": False}
    assert ours(TURNS, template_args=quiet) == [theirs(TURNS, **quiet)] != [theirs(TURNS)]
    cut = theirs(TURNS[:2], add_generation_prompt=False, continue_final_message=True)
    assert ours(TURNS[:2]) == [cut]
    assert "How are you?" in target.decode(cut)[-15:]
    many = ["Hello", TURNS, TURNS[:2]]
    how = {"chat": True, "system": "Be brief.", "template_args": quiet}
    assert target.encode_many(many, **how) == [target.encode(one, **how) for one in many]
    assert target.encode_many(many[:2], **how) == [target.encode(one, **how) for one in many[:2]]


def test_a_prompts_file_has_conversations(chatty, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": TURNS, "id": "a"}) + "\n" + json.dumps({"prompt": "The"}) + "\n")
    argv = [
        "--target",
        str(chatty),
        "--draft",
        "none",
        "--max-new-tokens",
        "4",
        "--json",
        "--prompts-file",
        str(path),
    ]
    assert main([*argv, "--system", "Be brief.", "--template-arg", "enable_thinking=false"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    target = hub.outline(str(chatty))
    want = target.encode_chat([SYSTEM, *TURNS], template_args={"enable_thinking": False})
    assert first["prompt_tokens"] == want and first["messages"] == TURNS and first["prompt"] is None
    assert second["prompt_tokens"] == target.encode("The")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--system", "x", "The"],
            "--system does not apply without --chat or messages, which have a chat template",
        ),
        (["--chat", "--template-arg", "x", "The"], "--template-arg is 'x': expected NAME=VALUE"),
    ],
)
def test_flags_without_a_conversation_are_refused(flags, sentence, capsys):
    assert main(flags) == 2 and sentence in capsys.readouterr().err


def test_what_is_no_conversation_gets_a_sentence(chatty):
    target = hub.outline(str(chatty))
    with pytest.raises(mj.MarsError, match=r"a turn is .*: expected an object with a role and its content"):
        mj.make_requests(target, [{"content": "x"}])
    with pytest.raises(mj.MarsError, match="system and template_args do not apply to plain texts"):
        mj.make_requests(target, "Hello", system="x")
    with pytest.raises(mj.MarsError, match=r"cannot be applied .*multiple values"):
        mj.make_requests(target, TURNS, template_args={"return_dict": True})
