"""Biases, bans and penalties from requests to tokens, compared with transformers."""

import json

import jax
import jax.numpy as jnp
import pytest

import mars_jax as mj
from mars_jax.cli.generate.command import main
from mars_jax.serve.session import prepare

TEXT = "Once upon a time"


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_and_no_draft_changes_it(capsys):
    """Apply a bias, a ban and a repetition penalty next to a row without edits, in refilled rows and in the CLI."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    target = mj.load("tiny/draft", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype="float32")
    ids = torch.tensor([target.encode(TEXT)])
    free = mj.generate(target, "none", TEXT, max_new_tokens=40, ignore_eos=True).tokens[0]
    banned, liked = free[2], free[9]
    with torch.inference_mode():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.2,
            sequence_bias={(liked,): 1.5}, bad_words_ids=[[banned]],
        )[0, ids.shape[1] :].tolist()  # fmt: skip
    options = {
        "repetition_penalty": [1.2, 1.0, 1.2], "logit_bias": [{liked: 1.5}, {}, {liked: 1.5}],
        "banned_tokens": [[banned], [], [banned]], "max_new_tokens": 40, "ignore_eos": True,
    }  # fmt: skip
    for drafter, size in (("none", 3), ("ngram", 2)):
        result = mj.generate(target, drafter, [TEXT] * 3, batch_size=size, **options)
        assert result.tokens == [expected, free, expected]
    flags = "--target tiny/draft --dtype float32 --draft ngram --verify exact --json --ignore-eos"
    flags += (
        f" --max-new-tokens 40 --repetition-penalty 1.2 --logit-bias {liked}=1.5 --logit-bias {banned}=-inf"
    )
    assert main([*flags.split(), TEXT]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected


@pytest.mark.slow
def test_a_minimum_length_is_that_of_transformers_under_every_draft(capsys):
    """Decode three prompts in two refilled rows, with two minima and two stop tokens. One prompt has no minimum."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    target = mj.load("tiny/draft", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype="float32")
    free = mj.generate(target, "none", TEXT, max_new_tokens=40, ignore_eos=True).tokens[0]
    stops, minima = [free[3], free[20]], [12, 0, 30]

    def transformers_tokens(minimum):
        ids = torch.tensor([target.encode(TEXT)])
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0,
                eos_token_id=stops, min_new_tokens=minimum,
            )[0, ids.shape[1] :].tolist()  # fmt: skip

    expected = [transformers_tokens(minimum) for minimum in minima]
    assert len({len(tokens) for tokens in expected}) > 1
    options = {"min_new_tokens": minima, "max_new_tokens": 40, "stop_tokens": stops, "batch_size": 2}
    for drafter in (
        "none",
        mj.drafters.load("model:tiny/draft", target, num_draft_tokens=4),
        mj.drafters.load("model:tiny/draft", target, tree=(2, 2, 1)),
    ):
        assert mj.generate(target, drafter, [TEXT] * 3, **options).tokens == expected
    flags = "--target tiny/draft --dtype float32 --draft ngram --verify exact --json --max-new-tokens 9"
    assert main([*flags.split(), "--min-new-tokens", "9", TEXT]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 9


def test_batches_with_9_to_16_biases_share_their_shapes():
    target, shapes = mj.load("tiny/draft"), []
    for count in (9, 16):
        banned = list(range(100, 100 + count))
        requests = mj.make_requests(target, TEXT, max_new_tokens=2, banned_tokens=banned)
        state = prepare(target, mj.drafters.load("none", target), requests)[2]
        shapes.append(jax.tree.map(jnp.shape, state))
    assert shapes[0] == shapes[1]
