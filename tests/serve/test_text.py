"""Stop strings: tokens as in transformers, text up to the string. Loops at the end of a completion."""

import json

import pytest

import mars_jax as mj
from mars_jax.cli.generate.command import main
from mars_jax.serve.requests import make_requests
from mars_jax.serve.text import LONGEST_PERIOD, RowText, ends_in_loop

PROMPTS = ("Once upon a time", "The cat", "A big dog ran to", "One day, Tim")
# Inside words, across tokens and at the ends of words. The last one never occurs.
STOPS = [["ily."], [" the ", "and"], [". He"], ["xyzzy"]]


@pytest.fixture(scope="module")
def target():
    return mj.load("tiny/target", dtype="float32")


@pytest.fixture(scope="module")
def expected_tokens(target):
    """Return the new tokens of each prompt, from transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype="float32")
    completions = []
    for prompt, stops in zip(PROMPTS, STOPS, strict=True):
        ids = torch.tensor([target.encode(prompt)])
        options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "tokenizer": target.tokenizer}
        with torch.inference_mode():
            out = model.generate(ids, stop_strings=stops, **options)
        completions.append(out[0, ids.shape[1] :].tolist())
    assert all(len(tokens) < 60 for tokens in completions[:3])
    return completions


@pytest.mark.slow
def test_the_tokens_are_those_of_transformers_and_the_text_ends_before(target, expected_tokens):
    """test_surfaces.py compares the other entry points."""
    result = mj.generate(target, "ngram", PROMPTS, max_new_tokens=60, stop_strings=STOPS)
    assert result.tokens == expected_tokens
    assert [c.finish_reason for c in result.completions] == ["stop"] * 3 + ["length"]
    for text, tokens, stops in zip(result.text, expected_tokens, STOPS, strict=True):
        # The space at the joint depends on the tokenizer.
        full_text = target.decode(tokens)
        cut = min([full_text.index(stop) for stop in stops if stop in full_text], default=len(full_text))
        assert text.strip() == full_text[:cut].strip()


@pytest.mark.slow
def test_the_command_stops_at_the_same_token(expected_tokens, capsys):
    code = main(["--draft", "none", "--max-new-tokens", "60", "--json", "--stop-string", "ily.", PROMPTS[0]])
    assert code == 0 and json.loads(capsys.readouterr().out)["tokens"] == expected_tokens[0]


@pytest.mark.slow
def test_a_row_that_has_said_a_stop_string_makes_room(target):
    options = {"max_new_tokens": 200, "ignore_eos": True, "batch_size": 2}
    free = mj.generate(target, "none", PROMPTS * 2, **options)
    stopped = mj.generate(target, "none", PROMPTS * 2, stop_strings=" the ", **options)
    assert stopped.forwards < free.forwards / 2


def test_a_special_token_is_a_stop_token(target):
    stops = [target.tokenizer.eos_token, "x"]
    [request] = make_requests(target, ["The"], stop_strings=stops, ignore_eos=True)
    assert request.stop_tokens == (target.tokenizer.eos_token_id,) and request.stop_strings == ("x",)


def test_what_may_begin_a_stop_string_is_held_back(target):
    [request] = make_requests(target, ["Once"], stop_strings=["red b", "bluest"])
    text = RowText(target, request)
    ids = target.encode("Once a red car and a blue bus")[len(target.encode("Once")) :]
    pieces = [text.feed([token], last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(pieces).strip() == "a red car and a blue bus" and not text.stopped
    assert not any(piece.endswith(("red", "blue")) for piece in pieces)


@pytest.mark.parametrize(
    ("stop_strings", "sentence"),
    [
        ("", "stop_strings is '': expected texts of at least one character"),
        ([["a"], ["b"]], "stop_strings has 2 values for 1 prompts"),
        ([3], "stop_strings is .3.: expected texts"),
        (["b", "\udcff"], "not valid Unicode"),
    ],
)
def test_bad_stop_strings_get_a_sentence(target, stop_strings, sentence):
    with pytest.raises(mj.MarsError, match=sentence):
        mj.generate(target, "none", ["The"], stop_strings=stop_strings)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([7] * 11, False),
        ([7] * 12, True),
        ([1, 2] * 6, True),
        ([1, 2] * 5 + [1], False),
        (list(range(20)) * 3, True),
        ([99, *list(range(20)) * 3], True),
        (list(range(20)) * 3 + [5, 6], False),
        (list(range(20)) * 3 + [0, 1, 2], True),  # cut off inside the phrase
        (list(range(LONGEST_PERIOD)) * 3, True),
        (list(range(LONGEST_PERIOD + 1)) * 3, False),
    ],
)
def test_a_repeated_phrase_at_the_end_is_a_loop(tokens, expected):
    assert ends_in_loop(tokens) is expected


def test_a_stop_token_is_not_part_of_a_loop():
    assert ends_in_loop([7] * 12 + [0], stop_tokens=[0])
    assert not ends_in_loop([7] * 12 + [0])
    assert not ends_in_loop([0] * 12, stop_tokens=[0])
