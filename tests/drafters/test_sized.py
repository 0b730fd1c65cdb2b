"""Adaptive draft length: the output of a fixed chain, a complete cache, and the choice of size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.drafters.sized import (
    MARGIN,
    PAUSE,
    PRIOR_TOKENS,
    USUAL_ACCEPTANCE,
    Counts,
    SizedParams,
    best_size,
    sized,
    with_size,
    with_step_costs,
)
from mars_jax.models.config import ModelConfig
from mars_jax.serve import sizes
from mars_jax.serve.prepare import prepared
from mars_jax.utils.errors import MarsError
from tests.helpers import draft_input, logits_after, ragged
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB

CHAIN = drafters.language_model(SMALL, 4)
CHAINS = drafters.LoadedDrafter(CHAIN, ())
ADAPTIVE = sized(CHAINS)
TREE = drafters.language_model(SMALL, tree=(2, 1))
RULE = verify.exact()
WIDTH = 160


class Both(drafters.language_model):
    """A draft model that also reads its target."""

    reads = ()


def params_of(loaded):
    return Params(target=(), draft=loaded.params)


def counts_of(accepted, expected):
    """Return the counts of rows with these numbers of accepted and expected draft tokens."""
    accepted, expected = jnp.asarray(accepted, jnp.float32), jnp.asarray(expected, jnp.float32)
    idle = jnp.zeros(accepted.shape, jnp.int32)
    return Counts(accepted, expected, idle)


def begun(loaded, params, temperature=0.0):
    decoder = loaded.decoder(TARGET, RULE)
    prompts, lengths = ragged([1, 2, 9], WIDTH, VOCAB)
    controls = make_controls(3, limit=jnp.asarray([WIDTH, 60, 110]), temperature=temperature)
    keys = keys_from_seeds(jnp.arange(3, dtype=jnp.uint32))
    return decoder, decode.start(decoder, params, Prompts(prompts, lengths, controls, RULE, keys))


def test_the_text_is_the_fixed_chains_whatever_is_chosen():
    """Decode greedy and sampled rows, at costs that make the drafter draft always, never and sometimes."""
    temperature, drafted = [0.0, 0.9, 0.9], []
    decoder, state = begun(CHAINS, Params(target=()), temperature)
    expected, _ = decode.run(decoder, Params(target=()), state)
    for costs in ([1.0, 1.01, 1.02], [1.0, 9.0, 9.0], [1.0, 1.4, 1.9]):
        params = params_of(with_step_costs(ADAPTIVE, costs))
        decoder, state = begun(ADAPTIVE, params, temperature)
        final, stats = decode.run(decoder, params, state)
        np.testing.assert_array_equal(final.tokens, expected.tokens)
        np.testing.assert_array_equal(final.length, expected.length)
        drafted.append(int(stats.proposed.sum()))
    always, never, mixed = drafted
    assert never == 0 < mixed < always


@pytest.mark.parametrize("matches", [True, False])
def test_what_finds_nothing_takes_nothing(matches):
    """A copied draft is looked up before its size is chosen: without a match, the step has only the root."""
    copies = sized(drafters.LoadedDrafter(drafters.ngram(3), ()), costs=[1.0, 1.01])
    prompt = [1, 2, 3, 1, 2, 3] if matches else [1, 2, 3, 4, 5, 6]
    tokens = jnp.zeros((1, 40), jnp.int32).at[0, :6].set(jnp.asarray(prompt))
    batch = Prompts(
        tokens, jnp.asarray([6]), make_controls(1, limit=40), RULE, keys_from_seeds(jnp.arange(1))
    )
    decoder = copies.decoder(TARGET, RULE)
    state = decode.start(decoder, params_of(copies), batch)
    expected, idle = np.asarray(state.draft.counts.expected), np.asarray(state.draft.counts.idle)
    next_state, info = decode.jitted_step(decoder, params_of(copies), state)
    assert info.num_proposed.tolist() == [3 if matches else 0]
    assert next_state.draft.counts.idle.tolist() == ([0] if matches else [idle[0] + 1])
    assert (next_state.draft.counts.expected[0] == expected[0]) is not matches


def test_a_copy_counts_as_its_match_is_long():
    """Compare the size with that of a sum over rows in Python, each with the estimate of its draft."""
    rng = np.random.default_rng(3)
    lengths, costs = (0, 2, 4), np.asarray([1.0, 1.5, 2.1])
    choose = jax.jit(lambda params, *rows: best_size(params, lengths, *rows))
    chosen_sizes = set()
    for _ in range(60):
        estimates = rng.choice([0.0, 0.3, 0.55, 0.8], 3)
        accepted, expected, live = rng.uniform(0, 9, 3), rng.uniform(0, 9, 3), rng.random(3) < 0.7
        counts = live if live.any() else ~live
        prior = USUAL_ACCEPTANCE * PRIOR_TOKENS
        right = (accepted[counts].sum() + prior) / (expected[counts].sum() + prior)
        speeds = []
        for length, cost in zip(lengths, costs, strict=True):
            tokens = [
                1 + sum(min(a * right, 1.0) ** k for k in range(1, length + 1)) for a in estimates[counts]
            ]
            speeds.append(np.mean(tokens) / cost * (1 if length else MARGIN))
        row_counts = counts_of(accepted, expected)
        params = SizedParams((), jnp.asarray(costs, jnp.float32))
        size = int(choose(params, row_counts, jnp.asarray(live), jnp.asarray(estimates, jnp.float32)))
        assert size == int(np.argmax(speeds))
        chosen_sizes.add(size)
    assert chosen_sizes == {0, 1, 2}


def test_a_trial_needs_a_draft():
    """After the pause, a row whose drafter found nothing is not tried; a row with a draft is."""
    params = SizedParams((), jnp.asarray([1.0, 1.001]))
    counts = counts_of([0.0], [90.0])._replace(idle=jnp.asarray([PAUSE]))
    for expected, size in ((0.0, 0), (0.3, 1)):
        assert int(best_size(params, (0, 4), counts, jnp.asarray([True]), jnp.asarray([expected]))) == size


@pytest.mark.slow
def test_after_steps_without_a_draft_the_drafts_are_those_of_a_fresh_model():
    order = [0, 2, 0, 0, 0, 1, 2, 2, 0, 1, *[0] * 70, 2]
    params = params_of(with_size(ADAPTIVE, 0))
    decoder, state = begun(ADAPTIVE, params)
    propose = jax.jit(ADAPTIVE.drafter.propose)
    emitted = []
    for turn, size in enumerate(order):
        if size:
            tree, _ = propose(params, state.draft, draft_input(state))
            for row in range(3):
                if bool(state.done[row]):
                    continue
                past = state.tokens[row, : state.length[row]].tolist()
                for token in tree.tokens[row, 1:].tolist():
                    assert token == int(np.argmax(logits_after(SMALL, past, width=WIDTH + 8))), (turn, row)
                    past.append(token)
        params = params_of(with_size(ADAPTIVE, size))
        state, info = decode.jitted_step(decoder, params, state)
        emitted.append(int(info.num_emitted.max()))
        assert emitted[-1] <= 1 + (0, 2, 4)[size]
    assert max(emitted) > 3


def test_it_tries_again_where_a_better_draft_would_pay_and_seldom():
    """If no draft is accepted, a step drafts as a trial after a pause without a draft."""

    def steps_with_drafts(costs):
        params = params_of(with_step_costs(ADAPTIVE, costs))
        # The second row is done and does not count.
        counts = counts_of([60.0, 0.0], [80.0, 1e9])
        live, usual = jnp.asarray([True, False]), jnp.full((2,), USUAL_ACCEPTANCE)
        choose = jax.jit(lambda counts: best_size(params.draft, ADAPTIVE.sizes.lengths, counts, live, usual))
        trials = []
        for step in range(400):
            if not int(choose(counts)):
                counts = counts._replace(idle=counts.idle + 1)
                continue
            trials.append(step)
            # A draft of four tokens that is rejected at once.
            counts = counts.after(jnp.int32(4), jnp.zeros((2,), jnp.int32), usual, PAUSE)
        return trials

    trial_steps = steps_with_drafts([1.0, 1.75, 2.3])  # pays at an acceptance of 0.63 but not at 0.53
    assert trial_steps and trial_steps[0] == PAUSE
    assert len(trial_steps) <= 400 // PAUSE
    assert steps_with_drafts([1.0, 5.0, 9.0]) == [], "no acceptance would make these costs pay"


@pytest.mark.slow
def test_costs_are_measured_once_for_a_shape_and_texts_are_the_same():
    target = mj.Pretrained.from_parts(TARGET, (), max_positions=256)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]
    options = {"verify": RULE, "max_new_tokens": 24, "temperature": [0.0, 0.8, 0.0, 1.0, 0.0]}
    expected = mj.generate(target, CHAINS, prompts, **options).tokens
    measured = len(sizes._MEASURED)
    for rows in (2, 8, 2):  # through a queue, and in one batch
        assert mj.generate(target, ADAPTIVE, prompts, batch_size=rows, **options).tokens == expected
    assert len(sizes._MEASURED) == measured + 2
    assert all(cost > 0 for costs in sizes._MEASURED.values() for cost in costs)
    with_costs = sized(CHAINS, costs=[1.0, 2.0, 3.0])
    assert mj.generate(target, with_costs, prompts, batch_size=2, **options).tokens == expected
    assert len(sizes._MEASURED) == measured + 2, "given costs are not measured"
    with pytest.raises(MarsError, match="with the lossy rule mars a text would depend"):
        mj.generate(target, ADAPTIVE, prompts, verify=verify.mars(theta=0.5))
    lossy = sized(CHAINS, costs=[1.0, 2.0, 3.0], any_rule=True)
    requests = mj.make_requests(target, prompts, max_new_tokens=4)
    assert prepared(target, lossy, requests, verify=verify.mars(theta=0.5)).drafter is lossy


def test_costs_are_those_of_steps_with_what_the_requests_ask_for(monkeypatch, own_cache):
    """Edits and draws are compiled into a step, and make it more expensive."""
    measured_for = []
    monkeypatch.setattr(sizes, "_MEASURED", {})
    monkeypatch.setattr(
        sizes, "_measure", lambda run, *_, **__: measured_for.append(run) or [[1.0, 2.0, 3.0]]
    )
    target = mj.Pretrained.from_parts(TARGET, (), max_positions=256)
    default, edits, draws = {}, {"logit_bias": {3: 1.0}}, {"temperature": 0.5}
    for options in (default, edits, draws, {**edits, **draws}, default, edits):
        requests = mj.make_requests(target, [[1, 2]], max_new_tokens=8, **options)
        sizes.with_costs(prepared(target, ADAPTIVE, requests), 2)
    assert len(measured_for) == 4


def test_a_later_process_reads_the_costs_from_disk(monkeypatch, own_cache):
    monkeypatch.setattr(
        sizes, "_measure", lambda *_, **__: [[1.0, 2.0, 9.0], [7.0, 9.0, 3.0], [7.0, 9.0, 9.0]]
    )
    sizes_of_model = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2}
    config = ModelConfig(vocab_size=TARGET.vocab_size, max_positions=256, **sizes_of_model)
    target = mj.Pretrained.from_parts(TARGET, (), config=config)
    requests = mj.make_requests(target, [[1, 2]], max_new_tokens=8)

    def costs():
        monkeypatch.setattr(sizes, "_MEASURED", {})  # as in a new process
        return sizes.with_costs(prepared(target, ADAPTIVE, requests), 2).params.draft.costs.tolist()

    assert costs() == [1.0, 2.0, 3.0]
    monkeypatch.setattr(sizes, "_measure", lambda *_, **__: [[2.0, 3.0, 4.0], [2.1, 3.0, 4.0]])
    assert costs() == [2.0, 3.0, 4.0], "costs that other load disturbed are not kept"
    monkeypatch.setattr(sizes, "_measure", lambda *_, **__: [[3.0, 4.0, 5.0]])
    assert costs() == [2.0, 3.0, 4.0]
    [path] = (own_cache / "draft_costs").iterdir()
    for damaged in ("", "[1.0]", "{"):
        path.write_text(damaged)
        assert costs() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sized(CHAINS._replace(drafter=TREE)), "no chains of several lengths"),
        (lambda: sized(ADAPTIVE), "no chains of several lengths"),
        (lambda: sized(CHAINS._replace(drafter=Both(SMALL, 4))), "no chains of several lengths"),
        (lambda: sized(CHAINS, [1, 4]), "rise from 0 to at most 4"),
        (lambda: sized(CHAINS, [0, 5]), "rise from 0 to at most 4"),
        (lambda: sized(CHAINS, costs=[1.0, 2.0]), "expected 3 positive numbers"),
    ],
)
def test_what_cannot_be_sized_is_named(make, message):
    with pytest.raises(MarsError, match=message):
        make()
