"""The most probable tokens at each position, compared with teacher forcing by transformers."""

import json

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, hub, verify
from mars_jax.cli.generate import command
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=96,
    eos_token_ids=(7,),
)  # fmt: skip
PROMPTS = [[3, 5, 8], [1], list(range(10, 50)), [9, 9, 4, 2]]
TEMPERATURES, TOP_K, PENALTIES = [0.0, 0.7, 1.3, 0.0], [0, 5, 0, 0], [1.0, 1.0, 1.3, 1.5]
TOP = 7


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Save and load a random checkpoint without a tokenizer."""
    path = tmp_path_factory.mktemp("top") / "target"
    hub.save(path, CONFIG, init_params(CONFIG, jax.random.key(0), scale=0.3))
    return mj.load(str(path))


@pytest.fixture(scope="module")
def reference(target):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(target.path)


def assert_are_the_best(pairs, logits):
    """Check (token id, log-probability) pairs against the logits [V] of the reference."""
    log_probs = logits.log_softmax(-1).numpy()
    order = np.argsort(-log_probs, kind="stable")[: len(pairs)]
    ids, scores = zip(*pairs, strict=True)
    np.testing.assert_allclose(scores, log_probs[order], atol=1e-4)
    np.testing.assert_allclose(
        log_probs[list(ids)], log_probs[order], atol=1e-4
    )  # ids may differ only in near ties


@pytest.mark.parametrize(
    "draft",
    ["ngram", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "tree", "sampled", "sized"))],
)
def test_they_are_those_of_teacher_forcing_by_transformers(target, reference, draft):
    """Two rows take four prompts in turn, with penalties, filters and stop tokens."""
    import torch
    from transformers.generation import logits_process

    model = f"model:{target.path}"
    drafter = {
        "tree": lambda: drafters.load(model, target, tree=(2, 2, 1)),
        "sampled": lambda: drafters.load(model, target, num_draft_tokens=3, sample=True),
        "sized": lambda: drafters.load(model, target, draft_size="auto"),
    }.get(draft, lambda: draft)()
    rule = verify.rejection() if draft == "sampled" else verify.exact()
    result = mj.generate(
        target, drafter, PROMPTS, verify=rule, batch_size=2, max_new_tokens=20, stop_tokens=[11, 12],
        temperature=TEMPERATURES, top_k=TOP_K, repetition_penalty=PENALTIES, top_log_probs=TOP,
    )  # fmt: skip
    for row, completion in enumerate(result.completions):
        ids = torch.tensor([PROMPTS[row] + completion.tokens])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(PROMPTS[row]) - 1 : -1]
        scores = completion.log_probs
        assert len(scores.top) == len(scores.processed_top) == len(completion.tokens) > 0
        penalty = logits_process.RepetitionPenaltyLogitsProcessor(PENALTIES[row])
        for place, (top, processed) in enumerate(zip(scores.top, scores.processed_top, strict=True)):
            assert len(top) == TOP
            assert_are_the_best(top, logits[place])
            before = ids[:, : len(PROMPTS[row]) + place]
            edited = penalty(before, logits[place : place + 1].clone())
            if TEMPERATURES[row] == 0:
                assert processed == ((completion.tokens[place], 0.0),)
                continue
            edited = edited / TEMPERATURES[row]
            if TOP_K[row]:
                edited = logits_process.TopKLogitsWarper(TOP_K[row])(before, edited)
            assert len(processed) == (TOP_K[row] or TOP)
            assert_are_the_best(processed, edited[0])


def test_a_lossy_rule_has_no_processed_ones(target):
    scores = mj.generate(target, "ngram", [[3]], verify=verify.mars(), max_new_tokens=3, top_log_probs=2)
    log_probs = scores.completions[0].log_probs
    assert [len(pairs) for pairs in log_probs.top] == [2] * 3 and log_probs.processed_top == ((),) * 3


def test_more_than_the_vocabulary_are_the_whole_vocabulary(target):
    result = mj.generate(target, "none", [[3]], max_new_tokens=1, top_log_probs=100)
    (top,) = result.completions[0].log_probs.top
    assert sorted(token for token, _ in top) == list(range(CONFIG.vocab_size))


def test_the_command_writes_them(capsys):
    command.main(["Once", "--max-new-tokens", "2", "--json", "--top-log-probs", "3", "--verify", "exact"])
    row = json.loads(capsys.readouterr().out)
    (token, log_prob), *_ = row["log_probs"]["top"][0]
    assert token == row["tokens"][0] and log_prob == pytest.approx(row["log_probs"]["log_prob"][0], abs=1e-5)
    assert [len(pairs) for pairs in row["log_probs"]["top"]] == [3, 3]
    assert row["log_probs"]["processed_top"][0] == [[token, 0.0]]
