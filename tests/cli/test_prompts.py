"""Prompts files: valid contents are read, and errors name the line of an invalid row."""

import io
import types

import pytest

from mars_jax.cli.generate.prompts import from_texts, read_prompts
from mars_jax.verify import RuleChoice
from tests.helpers.checkpoint_files import message

MARS = RuleChoice("mars", {})


def write(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def test_text_is_one_prompt_a_line_and_blank_lines_are_none(tmp_path):
    path = write(tmp_path, "p.txt", "\ufefffirst \r\n\n   \n second\u2028half\nlast")
    assert [row.prompt for row in read_prompts(path, MARS)] == ["first ", " second\u2028half", "last"]
    assert read_prompts(path, MARS)[-1].where == f"{path}, line 5"


def test_rows_carry_their_own_settings(tmp_path):
    line = (
        '{"id": "q1", "prompt": "a", "temperature": 1, "top_k": 4, "top_p": 0.5, "min_p": 0, "theta": Infinity, '
        '"max_relaxed_run": 2, "seed": 9, "max_new_tokens": 3, "strict": true, "draft_stop": 0.5}'
    )
    text, tokens = read_prompts(write(tmp_path, "p.jsonl", line + '\n\n{"prompt_tokens": [1, 2]}\n'), MARS)
    assert (text.prompt, text.tokens, text.id) == ("a", None, "q1")
    assert text.settings == {
        "temperature": 1.0, "top_k": 4, "top_p": 0.5, "min_p": 0.0,
        "seed": 9, "max_new_tokens": 3, "strict": True, "draft_stop": 0.5,
    }  # fmt: skip
    assert text.numbers == {"theta": float("inf"), "max_relaxed_run": 2} and tokens.numbers == {}
    assert (tokens.prompt, tokens.tokens, tokens.id, tokens.settings) == (None, (1, 2), None, {})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not an object"),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature' (did you mean"),
        ("{}", "it needs one of prompt, messages and prompt_tokens"),
        ('{"prompt": "a", "prompt_tokens": [1]}', "it needs one of prompt, messages and prompt_tokens"),
        ('{"prompt": null}', "prompt is None: expected a string"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "\\ud800"}', "prompt is not valid Unicode"),
        ('{"prompt": "a", "stop_strings": ["b", "\\ud800"]}', "stop_strings is not valid Unicode"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages is not valid Unicode"),
        ('{"prompt": "a", "\\ud800": 1}', "\\ud800 is not valid Unicode"),
        ('{"prompt_tokens": []}', "prompt_tokens is empty"),
        ('{"prompt_tokens": [true]}', "prompt_tokens is not a list of whole numbers"),
        ('{"prompt_tokens": "1"}', "prompt_tokens is not a list of whole numbers"),
        ('{"prompt": "a", "id": [1]}', "id is [1]: expected a string or a whole number"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature is 'hot': expected a finite number"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        ('{"prompt": "a", "temperature": true}', "temperature is True"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5"),
        ('{"prompt": "a", "theta": -1}', "theta is -1.0"),
        ('{"prompt": "a", "seed": -1}', "seed is -1"),
        ('{"prompt": "a", "draft_stop": -1}', "draft_stop is -1.0: expected a number of at least 0 (inf is"),
        ('{"prompt": "a", "strict": 1}', "strict is 1: expected true or false"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, expected):
    path = write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n' + line + "\n")
    assert message(read_prompts, path, MARS).startswith(f"{path}, line 2: {expected}")


def test_a_bad_file_is_named(tmp_path):
    assert "there is no prompts file" in message(read_prompts, str(tmp_path / "none.txt"), MARS)
    assert "cannot be read" in message(read_prompts, str(tmp_path), MARS)
    assert "holds no prompts" in message(read_prompts, write(tmp_path, "p.txt", "\n \n"), MARS)
    assert "line 2: it is not UTF-8" in message(read_prompts, write(tmp_path, "q.txt", b"fine\n\xff\n"), MARS)


@pytest.mark.parametrize("content", ["one\ntwo\n", '{"prompt": "one"}\n{"prompt": "two"}\n'])
def test_stdin_is_text_or_json_lines(monkeypatch, content):
    stdin = types.SimpleNamespace(buffer=io.BytesIO(content.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    rows = read_prompts("-", MARS)
    assert [row.prompt for row in rows] == ["one", "two"]
    assert rows[1].where == "stdin, line 2"


def test_prompts_of_the_command_line_are_not_empty():
    assert "the prompt is empty" in message(from_texts, ["a", ""])
    assert "not valid Unicode" in message(from_texts, ["\udcff"])
