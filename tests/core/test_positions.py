"""Draws are keyed by position: the text and the law of a seed, and the reported values of its tokens.

The model's logits are a hash of the visible tokens of a node, equal in every batch and for every draft shape. So
sequences are compared for equality, and laws with the joint distribution of all continuations.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.types import CORRECTED, EXACT, NO_KIND, RELAXED
from tests.helpers import NO_WEIGHTS, begin, committed, decode_all, logits_after, ragged, slow_but
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB, random_tree_drafter
from tests.helpers.rule_oracles import chi_square

DRAFTERS = {
    "ngram": drafters.ngram(4),
    "chain": drafters.language_model(SMALL, 5),
    "static tree": drafters.language_model(SMALL, tree=(3, 2, 1)),
    "dynamic tree": drafters.language_model(SMALL, tree=drafters.Dynamic(top_k=3, depth=4, nodes=12)),
    "random tree": random_tree_drafter(),
}


@pytest.mark.parametrize("drafter", slow_but(DRAFTERS, "static tree"))
def test_under_exact_a_seed_gives_the_same_text_with_any_deterministic_draft_and_with_none(drafter):
    prompts, lengths = ragged([1, 6, 21], 48, VOCAB)
    chosen = {"temperature": [1.0, 0.7, 1.4], "top_p": [1.0, 0.9, 1.0]}
    plain, _ = decode_all(TARGET, drafters.none(), verify.exact(), prompts, lengths, **chosen)
    drafted, stats = decode_all(TARGET, DRAFTERS[drafter], verify.exact(), prompts, lengths, **chosen)
    assert committed(drafted) == committed(plain)
    assert int(stats.accepted_exact.sum()) > 5  # drafts do occur


TINY = fake.hash_model(vocab_size=3, agree=0.6, scale=1.0)
TINY_DRAFT = fake.hash_model(vocab_size=3, seed=3, agree=0.6, scale=1.0)
NEW = 4


@functools.cache
def law(length):
    """Return the joint distribution of `NEW` tokens after the prompt, f64[3] * NEW."""
    prompt = ragged([length], length + NEW, 3)[0][0, :length].tolist()
    joint = np.ones((3,) * NEW)
    for depth in range(NEW):
        for prefix in itertools.product(range(3), repeat=depth):
            z = logits_after(TINY, prompt + list(prefix), width=length + NEW).astype(np.float64)
            p = np.exp(z - z.max())
            joint[prefix] *= (p / p.sum()).reshape((3,) + (1,) * (NEW - depth - 1))
    return joint


@pytest.mark.parametrize("rule", slow_but(["exact", "exact on a tree", "rejection", "block"], "exact"))
def test_texts_of_several_steps_follow_the_target(rule):
    """A draw used twice, by later nodes of a draft and by the next step, must not correlate tokens."""
    rows, length = 8000, 2
    prompts, lengths = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in ragged([length], length + NEW, 3))
    made = {"exact": verify.exact(), "rejection": verify.rejection(), "block": verify.rejection(block=True)}
    tree = (2, 2) if rule.endswith("tree") else None
    sample = rule in ("rejection", "block")
    drafter = drafters.language_model(TINY_DRAFT, 3, tree=tree, sample=sample)
    state, stats = decode_all(
        TINY, drafter, made[rule.split()[0]], prompts, lengths, temperature=1.0, seeds=range(rows)
    )
    assert 1.3 < float(stats.emitted.sum() / stats.steps.sum()) < 3.5  # several steps, and accepted drafts
    assert chi_square(np.asarray(state.tokens)[:, length:], law(length)) > 1e-3


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
                kept = z if not settings["top_k"][row] else np.where(z >= np.sort(z)[-4], z, -np.inf)
                want = log_softmax(kept / temperature)[token]
                np.testing.assert_allclose(processed, want, atol=1e-4)
            kinds.add(kind)
            text.append(token)
    assert kinds == ({EXACT, RELAXED, CORRECTED} if lossy else {EXACT, CORRECTED})


def test_a_row_fails_only_if_logits_on_its_own_path_are_broken():
    """Put NaN after chosen tokens: some that only one row reads, and some that are only drafted and never walked."""
    vocab, tree = 97, (3, 2, 1)
    model = fake.hash_model(vocab_size=vocab, agree=0.6)
    drafter = drafters.language_model(fake.hash_model(vocab_size=vocab, seed=5, agree=0.6), tree=tree)
    prompts, lengths = ragged([3, 9, 5], 32, vocab)
    texts = committed(decode_all(model, drafter, verify.exact(), prompts, lengths)[0])
    read = [set(text[n - 1 : -1]) for text, n in zip(texts, lengths.tolist(), strict=True)]
    victim = next(t for t in texts[1][int(lengths[1]) + 5 :] if t not in read[0] | read[2])

    def broken(bad):
        def forward(params, tokens, visible, cache):
            output = model.forward(params, tokens, visible, cache)
            flag = jnp.isin(tokens, jnp.asarray(bad))[:, :, None].astype(jnp.uint32)
            return output._replace(hidden=jnp.concatenate([output.hidden, flag], axis=2))

        def unembed(params, hidden):
            return jnp.where(hidden[:, :, 1:] > 0, jnp.nan, model.unembed(params, hidden[:, :, :1]))

        return model._replace(forward=forward, unembed=unembed)

    unread = sorted(set(range(vocab)) - read[0] - read[1] - read[2])
    off_path, _ = decode_all(broken(unread), drafter, verify.exact(), prompts, lengths)
    assert not off_path.failed.any() and committed(off_path) == texts
    hit, _ = decode_all(broken([victim]), drafter, verify.exact(), prompts, lengths)
    assert hit.failed.tolist() == [False, True, False]
    assert committed(hit)[0] == texts[0] and committed(hit)[2] == texts[2]
    stopped = committed(hit)[1]
    assert stopped == texts[1][: len(stopped)] and len(stopped) < 32
