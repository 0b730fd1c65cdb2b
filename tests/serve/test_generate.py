"""`generate`, compared with PyTorch transformers on the same checkpoint."""

import json

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import contrib, drafters, fake, hub, verify
from mars_jax.cli.generate import command, job
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params
from mars_jax.serve import prepare as batch
from mars_jax.serve.text import Detokenizer

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=96,
    eos_token_ids=(7,),
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Save and load a random checkpoint without a tokenizer."""
    path = tmp_path_factory.mktemp("api") / "target"
    hub.save(path, CONFIG, init_params(CONFIG, jax.random.key(0), scale=0.3))
    return mj.load(str(path))


PROMPTS = [[3, 5, 8], [1], list(range(10, 50))]


@pytest.mark.parametrize("rule", ["exact", "mars"])
@pytest.mark.slow
def test_log_probabilities_are_those_of_teacher_forcing_by_transformers(target, rule):
    """Compare log-probabilities before and after temperature and filters, at every new token of a ragged batch."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path)
    temperatures, top_k = [0.0, 0.7, 1.3], 5
    result = mj.generate(
        target, "ngram", PROMPTS, max_new_tokens=30, ignore_eos=True, temperature=temperatures, top_k=[0, top_k, 0],
        verify=verify.mars(theta=0.5) if rule == "mars" else None, log_probs=True,
    )  # fmt: skip
    filters = transformers.generation.logits_process
    for prompt, temperature, completion in zip(PROMPTS, temperatures, result.completions, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + completion.tokens])
            z = model(ids).logits[0, len(prompt) - 1 : -1].double()
        new = torch.tensor(completion.tokens)[:, None]
        log_prob_of = lambda z, new=new: torch.log_softmax(z, -1).gather(1, new)[:, 0].numpy()  # noqa: E731
        scores = completion.log_probs
        np.testing.assert_allclose(scores.log_prob, log_prob_of(z), atol=1e-4)
        scaled = z / (temperature or 1)
        np.testing.assert_allclose(scores.temperature_log_prob, log_prob_of(scaled), atol=1e-4)
        regret = (z.max(-1).values[:, None] - z.gather(1, new))[:, 0]
        np.testing.assert_allclose(scores.regret, regret, atol=1e-4)
        if rule == "mars":
            assert np.all(np.isnan(scores.processed_log_prob))
        elif temperature == 0:
            assert set(scores.processed_log_prob) == {0.0}
        else:
            filtered = filters.TopKLogitsWarper(top_k)(None, scaled) if temperature == 0.7 else scaled
            np.testing.assert_allclose(scores.processed_log_prob, log_prob_of(filtered), atol=1e-4)
        assert len(scores.kind) == 30 and set(scores.kind) <= {"exact", "relaxed", "corrected"}
    assert mj.generate(target, "none", [[3]], max_new_tokens=2).completions[0].log_probs is None


FOUR_PROMPTS = [*PROMPTS, [9, 9, 4, 2]]
TEMPERATURES, TOP_K, PENALTIES = [0.0, 0.7, 1.3, 0.0], [0, 5, 0, 0], [1.0, 1.0, 1.3, 1.5]
TOP = 7


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


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "none", "tree", "sampled", "sized"])
def test_the_most_probable_tokens_are_those_of_teacher_forcing_by_transformers(target, reference, draft):
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
        target, drafter, FOUR_PROMPTS, verify=rule, batch_size=2, max_new_tokens=20, stop_tokens=[11, 12],
        temperature=TEMPERATURES, top_k=TOP_K, repetition_penalty=PENALTIES, top_log_probs=TOP,
    )  # fmt: skip
    for row, completion in enumerate(result.completions):
        ids = torch.tensor([FOUR_PROMPTS[row] + completion.tokens])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(FOUR_PROMPTS[row]) - 1 : -1]
        scores = completion.log_probs
        assert len(scores.top) == len(scores.processed_top) == len(completion.tokens) > 0
        penalty = logits_process.RepetitionPenaltyLogitsProcessor(PENALTIES[row])
        for place, (top, processed) in enumerate(zip(scores.top, scores.processed_top, strict=True)):
            assert len(top) == TOP
            assert_are_the_best(top, logits[place])
            before = ids[:, : len(FOUR_PROMPTS[row]) + place]
            edited = penalty(before, logits[place : place + 1].clone())
            if TEMPERATURES[row] == 0:
                assert processed == ((completion.tokens[place], 0.0),)
                continue
            edited = edited / TEMPERATURES[row]
            if TOP_K[row]:
                edited = logits_process.TopKLogitsWarper(TOP_K[row])(before, edited)
            assert len(processed) == (TOP_K[row] or TOP)
            assert_are_the_best(processed, edited[0])


FAKE = mj.Pretrained.from_parts(fake.hash_model(vocab_size=64), (), max_positions=32)


def test_a_lossy_rule_has_no_processed_most_probable_tokens():
    """A top_log_probs above the vocabulary size returns all tokens."""
    scores = mj.generate(FAKE, "ngram", [[3]], verify=verify.mars(), max_new_tokens=3, top_log_probs=100)
    log_probs = scores.completions[0].log_probs
    assert log_probs.processed_top == ((),) * 3
    assert [sorted(token for token, _ in pairs) for pairs in log_probs.top] == [list(range(64))] * 3


def test_the_command_writes_the_most_probable_tokens(capsys):
    flags = "--target tiny/draft --draft none --max-new-tokens 2 --json --top-log-probs 3"
    command.main(["Once", *flags.split()])
    row = json.loads(capsys.readouterr().out)
    (token, log_prob), *_ = row["log_probs"]["top"][0]
    assert token == row["tokens"][0] and log_prob == pytest.approx(row["log_probs"]["log_prob"][0], abs=1e-5)
    assert [len(pairs) for pairs in row["log_probs"]["top"]] == [3, 3]
    assert row["log_probs"]["processed_top"][0] == [[token, 0.0]]


SEEDS = [
    ({}, 4, [0, 1, 2, 3]),
    ({"seed": np.int64(7)}, 2, [7, 8]),
    ({"seed": 2**32 - 1}, 3, [2**32 - 1, 0, 1]),
    ({"seed": [9, 4]}, 2, [9, 4]),
    ({"samples": 3, "seed": 10}, 2, [10, 11, 12, 13, 14, 15]),
    ({"samples": 3, "seed": [10, 20]}, 2, [10, 11, 12, 20, 21, 22]),
]


@pytest.mark.parametrize(("options", "count", "seeds"), SEEDS)
def test_every_request_draws_with_a_seed_of_its_own(target, options, count, seeds):
    requests = mj.make_requests(target, [[3]] * count, temperature=1.0, **options)
    assert [request.seed for request in requests] == seeds


@pytest.mark.parametrize("argv", [[], ["--seed", "7"], ["--seed", str(2**32 - 1)]])
def test_the_command_and_the_library_draw_with_the_same_seeds(target, argv):
    rows = [PromptRow(where="", tokens=(3,))] * 3
    seeds = [request.seed for request in job.make_job_requests(target, parse(argv), rows)]
    options = {"seed": int(argv[1])} if argv else {}
    assert seeds == [request.seed for request in mj.make_requests(target, [[3]] * 3, **options)]


def test_unseeded_samples_differ_and_every_call_repeats_them():
    unseeded, seeded = (
        mj.generate(FAKE, "none", [[3]] * 4, temperature=1.0, max_new_tokens=12, **seed).tokens
        for seed in ({}, {"seed": [0, 1, 2, 3]})
    )
    assert unseeded == seeded and len({tuple(tokens) for tokens in unseeded}) == 4


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        (None, {}, "the prompts are of type NoneType: give strings"),
        ([], {}, "there are no prompts"),
        ([[]], {}, "the prompt has no tokens"),
        ([[1] * 96], {}, "the prompt has 96 tokens and .* a context of 96"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"seed": [1, 2]}, "seed has 2 values for 1 prompts"),
        ([1, 2], {}, "prompt 0 is 1: expected a list of token ids"),
        ([[1.5, 3]], {}, "prompt 0 is .*: expected a list of token ids"),
        ([[1], [2]], {"stop_tokens": [[3]]}, "stop_tokens has 1 values for 2 prompts"),
        ([[1]], {"logit_bias": {97: 1.0}}, r"logit_bias has 97: 1\.0: expected one of the"),
        ([[1]], {"logit_bias": [{}, {}]}, "logit_bias has 2 values for 1 prompts"),
        ([[1]], {"stop_tokens": [3], "ignore_eos": True}, "contradict each other"),
        ([[1]], {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9 and max_new_tokens 8"),
        (
            [[1]],
            {"min_new_tokens": 2, "allowed_tokens": [1]},
            "min_new_tokens does not apply with a constraint",
        ),
        ([[1]], {"theta": 0.5}, r"theta is a setting of the rule: give it there, as in verify=mars\(theta="),
        ([[1]], {"strict": True}, "strict does not apply to the lossless rule exact"),
        ([[1]], {"draft_stop": 0.5}, "draft_stop does not apply to the drafter 'none"),
        ([[1]], {"batch_size": 0}, "batch_size is 0"),
        ([[1]], {"verify": "mars"}, "verify is 'mars': expected a rule"),
        ([[1]], {"verify": contrib.learned()}, "the rule learned needs weights: pass .*LoadedRule"),
        ([[1]], {"verify": verify.mars(theta=[0.2, 0.9])}, "theta of the rule has 2 values for 1 prompts"),
    ],
)
def test_bad_input_gets_a_sentence(target, prompts, options, sentence):
    with pytest.raises(mj.MarsError, match=sentence):
        mj.generate(target, "none", prompts, **options)


def test_a_drafter_of_the_wrong_type_gets_a_sentence(target):
    with pytest.raises(mj.MarsError, match="the drafter is of type int: give a spec such as 'ngram'"):
        mj.generate(target, 5, [[1]])


def test_an_option_that_does_not_exist_is_a_type_error(target):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'topk' \(did you mean top_k\?\)"):
        mj.generate(target, "none", [[1]], topk=5)


def test_buckets_grow_by_a_third_or_a_half():
    sizes = [batch.bucket(n) for n in range(1, 5000)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]


def test_detokenized_pieces_join_to_the_text():
    """The text has multi-byte characters, spaces at token boundaries, and tokens of one byte."""
    tokenizer = hub.outline("tiny/target")
    text = "Once upon a time, a café in Tōkyō \N{SNOWMAN} had  two   spaces.\nThe end"
    ids = tokenizer.encode(text)
    for cut in (1, 3, len(ids) - 1):
        prompt, new_ids = ids[:cut], ids[cut:]
        detokenizer = Detokenizer(tokenizer, prompt)
        pieces = [detokenizer.feed([t], last=i == len(new_ids) - 1) for i, t in enumerate(new_ids)]
        assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(ids)
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
