"""Conversations in Python, prompts files and the command, compared with the ids that transformers gives."""

import json
import shutil

import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.cli.generate.command import main
from mars_jax.cli.generate.prompts import read_prompts
from mars_jax.verify import RuleChoice
from tests.matrix.world import world

TEMPLATE = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% if not loop.last or m.role != 'assistant' %}
{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}
{%- endif %}"""
MARS = RuleChoice("mars", {})
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi. How are you?"},
    {"role": "user", "content": "Well"},
]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """Return a small target with a template that reads roles and a custom variable."""
    path = tmp_path_factory.mktemp("chatty") / "target"
    shutil.copytree(world().target, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_a_conversation_has_the_ids_of_transformers(chatty):
    """Compare system prompts, several turns, template variables, and an answer that the model continues."""
    target = hub.outline(str(chatty))

    def transformers_ids(turns, **variables):
        variables = {"add_generation_prompt": True, "return_dict": True} | variables
        return target.tokenizer.apply_chat_template(turns, **variables)["input_ids"]

    def request_ids(prompts, **arguments):
        return [list(request.prompt_tokens) for request in mj.make_requests(target, prompts, **arguments)]

    assert request_ids(TURNS) == request_ids([TURNS]) == [transformers_ids(TURNS)]
    assert request_ids("Hello", chat=True, system="Be brief.") == [transformers_ids([SYSTEM, TURNS[0]])]
    assert request_ids([[SYSTEM, *TURNS], TURNS], system="Sing.") == [
        transformers_ids([SYSTEM, *TURNS]),
        transformers_ids([{"role": "system", "content": "Sing."}, *TURNS]),
    ]
    quiet = {"enable_thinking": False}
    quiet_ids = transformers_ids(TURNS, **quiet)
    assert request_ids(TURNS, template_args=quiet) == [quiet_ids] != [transformers_ids(TURNS)]
    cut = transformers_ids(TURNS[:2], add_generation_prompt=False, continue_final_message=True)
    assert request_ids(TURNS[:2]) == [cut]
    assert "How are you?" in target.decode(cut)[-15:]
    many = ["Hello", TURNS, TURNS[:2]]
    options = {"chat": True, "system": "Be brief.", "template_args": quiet}
    assert target.encode_many(many, **options) == [target.encode(prompt, **options) for prompt in many]


def test_a_prompts_file_has_conversations(chatty, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": TURNS, "id": "a"}) + "\n" + json.dumps({"prompt": "The"}) + "\n")
    argv = ["--target", str(chatty), "--draft", "none", "--max-new-tokens", "4", "--json"]
    argv += ["--prompts-file", str(path)]
    assert main([*argv, "--system", "Be brief.", "--template-arg", "enable_thinking=false"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    target = hub.outline(str(chatty))
    want = target.encode_chat([SYSTEM, *TURNS], template_args={"enable_thinking": False})
    assert first["prompt_tokens"] == want and first["messages"] == TURNS and first["prompt"] is None
    assert second["prompt_tokens"] == target.encode("The")


def test_template_variables_that_do_not_apply_get_a_sentence(chatty):
    target = hub.outline(str(chatty))
    with pytest.raises(mj.MarsError, match="system and template_args do not apply to texts"):
        mj.make_requests(target, "Hello", system="x")
    with pytest.raises(mj.MarsError, match=r"cannot be applied .*multiple values"):
        mj.make_requests(target, TURNS, template_args={"return_dict": True})


def text_part(text):
    return {"type": "text", "text": text}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
READ_AS = {
    "two parts": ({"role": "user", "content": [text_part("He"), text_part("llo")]}, "Hello"),
    "no part": ({"role": "user", "content": []}, ""),
    "a tuple": ({"role": "user", "content": (text_part("Hello"),)}, "Hello"),
    "a tool call": ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
    "other keys": ({"role": "user", "content": "Hello", "name": "Tom"}, "Hello"),
}
REFUSED = {
    "an image": ({"role": "user", "content": [text_part("a"), {"type": "image_url", "image_url": {"url": "x"}}]},
                 "a content part is of type 'image_url': only text is supported"),
    "a part without a type": ({"role": "user", "content": [{"text": "a"}]}, "a content part is {'text': 'a'}"),
    "a part that is a string": ({"role": "user", "content": ["a"]}, "a content part is 'a': expected"),
    "a part whose text is a number": ({"role": "user", "content": [text_part(5)]}, "the text of a content part is 5"),
    "None": ({"role": "assistant", "content": None}, "the content of a turn of the assistant is None"),
    "a number": ({"role": "user", "content": 5}, "the content of a turn of the user is 5: expected a string"),
    "no role": ({"content": "a"}, "a turn is {'content': 'a'}: expected an object with a role"),
    "a role that is a number": ({"role": 1, "content": "a"}, "a turn is .*: expected an object with a role"),
    "half a character": ({"role": "user", "content": "\ud800"}, "a turn of the user is .* not valid Unicode"),
    "no object": ("user", "a turn is 'user': expected an object with a role"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_AS)
def test_a_content_in_parts_is_read_as_one_string(name, chatty, tmp_path):
    target = hub.outline(str(chatty))
    turn, content = READ_AS[name]
    last_turn = {"role": "user", "content": "x"}
    turns, string_turns = [turn, last_turn], [turn | {"content": content}, last_turn]
    template = target.tokenizer.apply_chat_template
    expected = template(string_turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert mj.Chat(target).ask(turns).prompt_tokens == tuple(expected)
    assert target.encode(turns) == target.encode_chat(turns) == target.encode_many([turns])[0] == expected
    [request] = mj.make_requests(target, [turns])
    assert list(request.prompt_tokens) == expected and request.messages == tuple(turns)
    # JSON has no tuples.
    if name != "a tuple":
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"messages": turns}))
        [row] = read_prompts(str(path), MARS)
        assert row.messages == tuple(turns)


@pytest.mark.parametrize("name", REFUSED)
def test_a_content_that_is_not_text_is_refused_by_name(name, chatty, tmp_path):
    target = hub.outline(str(chatty))
    turn, sentence = REFUSED[name]
    turns = [{"role": "user", "content": "x"}, turn]
    for call in (
        lambda: mj.make_requests(target, [turns]),
        lambda: mj.Chat(target).ask(turns),
        lambda: target.encode(turns),
        lambda: target.encode_chat(turns),
        lambda: target.encode_many([turns]),
    ):
        with pytest.raises(mj.MarsError, match=sentence):
            call()
    # A file cannot hold half a character.
    if "half" not in name:
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"messages": turns}))
        with pytest.raises(mj.MarsError, match=f"line 1: {sentence}"):
            read_prompts(str(path), MARS)
