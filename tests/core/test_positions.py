"""Draws keyed by position: the tokens of a seed, their distribution, and the values reported for each token."""

import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.types import CORRECTED, EXACT, NO_KIND, RELAXED
from tests.helpers import (
    NO_WEIGHTS,
    begin,
    broken_after,
    committed,
    decode_all,
    logits_after,
    ragged,
    rule_oracles,
    sampled_texts,
    slow_but,
)
from tests.helpers.fake_drafters import DRAFTERS, TARGET, VOCAB


@pytest.mark.parametrize(
    "drafter", slow_but([name for name in DRAFTERS if "sampled" not in name], "static tree")
)
def test_under_exact_a_seed_gives_the_same_text_with_any_deterministic_draft_and_with_none(drafter):
    prompts, lengths = ragged([1, 6, 21], 48, VOCAB)
    settings = {"temperature": [1.0, 0.7, 1.4], "top_p": [1.0, 0.9, 1.0]}
    oracle, _ = decode_all(TARGET, drafters.none(), verify.exact(), prompts, lengths, **settings)
    drafted, stats = decode_all(TARGET, DRAFTERS[drafter], verify.exact(), prompts, lengths, **settings)
    assert committed(drafted) == committed(oracle)
    assert int(stats.accepted_exact.sum()) > 5, "drafts do occur"


LOSSLESS = {
    "exact": (verify.exact(), {}),
    "exact on a tree": (verify.exact(), {"tree": (2, 2)}),
    "rejection": (verify.rejection(), {"sample": True}),
    "block": (verify.rejection(block=True), {"sample": True}),
    "rejection on a tree": (verify.rejection(), {"tree": (2, 2), "sample": True}),
    "rejection on a dynamic tree": (verify.rejection(), {"tree": drafters.Dynamic(3, 2, 6), "sample": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_texts_of_several_steps_follow_the_target(name):
    """A draw used twice, by later nodes of a draft and by the next step, must not correlate tokens."""
    rule, shape = LOSSLESS[name]
    drafter = drafters.language_model(sampled_texts.SMALL, 2, **shape)
    text, tau = sampled_texts.sampled(drafter, rule)
    law = rule_oracles.sequence_probabilities(sampled_texts.law(sampled_texts.TARGET))
    assert rule_oracles.chi_square(text, law) > 1e-3
    assert 1.15 < tau < 2.5, "several steps, and accepted drafts"


def log_softmax(z):
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


@pytest.mark.parametrize("rule", slow_but(["exact", "mars"], "mars"))
def test_a_step_reports_the_log_probabilities_regret_and_kind_of_its_tokens(rule):
    """Compare three log-probabilities, the regret and the kind of every token with a forward over its prefix."""
    prompts, lengths = ragged([3, 9, 5], 32, VOCAB)
    settings = {"temperature": [0.0, 0.7, 1.3], "top_k": [0, 4, 0]}
    lossy = rule == "mars"
    strict = {"strict": [False, True, False]} if lossy else {}
    batch = (TARGET, DRAFTERS["static tree"], verify.mars(theta=0.5) if lossy else verify.exact())
    decoder, state = begin(*batch, prompts, lengths, **settings, **strict)
    emitted = [[] for _ in range(3)]
    names = ("emitted", "log_prob", "temperature_log_prob", "processed_log_prob", "regret", "kind")
    for _, info in decode.stream(decoder, NO_WEIGHTS, state):
        for row in range(3):
            n = int(info.num_emitted[row])
            columns = [np.asarray(getattr(info, name)[row, :n]).tolist() for name in names]
            emitted[row] += zip(*columns, strict=True)
            assert set(info.kind[row, n:].tolist()) <= {NO_KIND}
            assert not np.any(np.asarray(info.log_prob[row, n:]))
    kinds = set()
    for row in range(3):
        text = prompts[row, : lengths[row]].tolist()
        temperature = settings["temperature"][row]
        for token, raw, tempered, processed, regret, kind in emitted[row]:
            z = logits_after(TARGET, text, width=32).astype(np.float64)
            np.testing.assert_allclose(raw, log_softmax(z)[token], atol=1e-4)
            np.testing.assert_allclose(tempered, log_softmax(z / (temperature or 1.0))[token], atol=1e-4)
            np.testing.assert_allclose(regret, z.max() - z[token], atol=1e-4)
            if lossy and row != 1:
                assert np.isnan(processed)
            elif temperature == 0:
                assert processed == 0.0
            else:
                filtered = z if not settings["top_k"][row] else np.where(z >= np.sort(z)[-4], z, -np.inf)
                expected = log_softmax(filtered / temperature)[token]
                np.testing.assert_allclose(processed, expected, atol=1e-4)
            kinds.add(kind)
            text.append(token)
    assert kinds == ({EXACT, RELAXED, CORRECTED} if lossy else {EXACT, CORRECTED})


def test_a_row_fails_only_if_logits_on_its_own_path_are_broken():
    """Put NaN after a token that only one row reads, or after tokens that are drafted and never accepted."""
    vocab, tree = 97, (3, 2, 1)
    model = broken_after(fake.hash_model(vocab_size=vocab, agree=0.6))
    drafter = drafters.language_model(fake.hash_model(vocab_size=vocab, seed=5, agree=0.6), tree=tree)
    prompts, lengths = ragged([3, 9, 5], 32, vocab)

    def decoded(*tokens):
        params = NO_WEIGHTS._replace(target=np.isin(np.arange(vocab), tokens))
        return decode_all(model, drafter, verify.exact(), prompts, lengths, params=params)[0]

    texts = committed(decoded())
    read = [set(text[n - 1 : -1]) for text, n in zip(texts, lengths.tolist(), strict=True)]
    victim = next(t for t in texts[1][int(lengths[1]) + 5 :] if t not in read[0] | read[2])

    unread = sorted(set(range(vocab)) - read[0] - read[1] - read[2])
    off_path = decoded(*unread)
    assert not off_path.failed.any() and committed(off_path) == texts
    hit = decoded(victim)
    assert hit.failed.tolist() == [False, True, False]
    assert committed(hit)[0] == texts[0] and committed(hit)[2] == texts[2]
    stopped = committed(hit)[1]
    assert stopped == texts[1][: len(stopped)] and len(stopped) < 32
