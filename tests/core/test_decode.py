"""The step and its loops, with a model that exposes wrong masks, positions, slots and rollbacks."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.cache import KVCache
from mars_jax.core.controls import make_controls
from mars_jax.core.metrics import accumulate, summarize, zero_stats
from mars_jax.core.types import NO_KIND, NO_TOKEN, Prompts, keys_from_seeds
from mars_jax.utils.errors import MarsError
from tests.helpers import NO_WEIGHTS, begin, committed, decode_all, logits_after, ragged, slow_but
from tests.helpers.fake_drafters import DRAFTERS, SMALL, TARGET, VOCAB

RULES = {
    "exact": verify.exact(),
    "rejection": verify.rejection(),
    "block": verify.rejection(block=True),
    "mars": verify.mars(),
    "mars over rejection": verify.mars(base=verify.rejection()),
    "mars over block": verify.mars(base=verify.rejection(block=True)),
}
PAIRS = [
    ("chain", "mars"),
    ("sampled chain", "mars over block"),
    ("ngram", "exact"),
    ("static tree", "mars"),
    ("static tree", "exact"),
    ("chain of 1", "rejection"),
    ("random tree", "mars"),
]
"""Every drafter, every rule, and every rule that reads the q of a sampled chain."""


def autoregressive(prompts, lengths, **settings):
    return decode_all(TARGET, drafters.none(), verify.exact(), prompts, lengths, **settings)[0]


@pytest.mark.parametrize(("drafter", "rule"), slow_but(PAIRS, PAIRS[0]))
def test_greedy_output_is_that_of_autoregression(drafter, rule):
    prompts, lengths = ragged([1, 2, 19, 30], 48, VOCAB)
    state, stats = decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, theta=np.inf)
    assert committed(state) == committed(autoregressive(prompts, lengths))
    assert int(stats.steps.sum()) <= int(stats.emitted.sum())


def test_autoregression_is_the_plain_loop_over_the_model():
    """Check the oracle itself: recompute the hash of the whole prefix for every token."""
    prompts, lengths = ragged([1, 3, 9, 47], 48, VOCAB)
    state, stats = decode_all(TARGET, drafters.none(), verify.exact(), prompts, lengths)
    decoded = committed(state)
    assert decoded == committed(autoregressive(prompts, lengths)) and stats.tokens is None
    for row in range(4):
        tokens = prompts[row, : lengths[row]].tolist()
        while len(tokens) < 48:
            tokens.append(int(np.argmax(logits_after(TARGET, tokens, width=48))))
        assert decoded[row] == tokens


@pytest.mark.parametrize("tree", [None, pytest.param((3, 2, 2, 1, 1), marks=pytest.mark.slow)])
def test_a_perfect_draft_is_accepted_in_full(tree):
    prompts, lengths = ragged([1, 2, 5], 61, VOCAB)
    twin = drafters.language_model(TARGET, 5, tree=tree)
    _, stats = decode_all(TARGET, twin, verify.exact(), prompts, lengths, limit=lengths + 54)
    assert np.asarray(stats.depth_histogram).tolist() == [[0, 0, 0, 0, 0, 9]] * 3


@pytest.mark.slow
def test_stream_takes_the_steps_of_run():
    """Compare tokens, counters, and the recorded fields of every token with the `StepInfo` of each step."""
    prompts, lengths = ragged([2, 9, 17, 30], 48, VOCAB)
    settings = {
        "limit": [48, 30, 40, 48],
        "temperature": [0.0, 1.0, 0.7, 0.0],
        "stop_tokens": [[3], [], [5, 6], []],
    }
    batch = (TARGET, DRAFTERS["static tree"], verify.mars(), prompts, lengths)
    decoder, state = begin(*batch, **settings)
    final, stats = decode.run(decoder, NO_WEIGHTS, state, record=True)
    counters, infos = zero_stats(4, decoder.max_depth), []
    for state, info in decode.stream(decoder, NO_WEIGHTS, begin(*batch, **settings)[1]):
        counters = accumulate(counters, info, state.length)
        infos.append(info)
    assert committed(state) == committed(final)
    jax.tree.map(np.testing.assert_array_equal, counters, dataclasses.replace(stats, tokens=None))
    for row, (begins, end) in enumerate(zip(lengths.tolist(), final.length.tolist(), strict=True)):
        steps = [info.emitted[row, : int(info.num_emitted[row])] for info in infos]
        np.testing.assert_array_equal(np.concatenate(steps), final.tokens[row, begins:end])
        for name in ("log_prob", "temperature_log_prob", "processed_log_prob", "regret", "kind"):
            steps = [getattr(info, name)[row, : int(info.num_emitted[row])] for info in infos]
            recorded = np.asarray(getattr(stats.tokens, name)[row])
            np.testing.assert_array_equal(recorded[begins:end], np.concatenate(steps))
            assert {*recorded[:begins], *recorded[end:]} <= {NO_KIND if name == "kind" else 0}
    totals = summarize(stats)
    # A step that a limit or a stop token cuts short emits no bonus token.
    assert totals.accepted <= totals.emitted <= totals.accepted + totals.steps
    assert totals.emitted == int(np.sum(final.length - lengths))


def test_rows_stop_at_their_own_stop_tokens_and_limits():
    prompts, lengths = ragged([5, 5, 5, 5], 48, VOCAB, seed=3)
    prompts = jnp.broadcast_to(prompts[:1], prompts.shape)
    free = committed(autoregressive(prompts, lengths))[0]
    stop = free[20]
    first = free.index(stop, 5)
    settings = {"limit": [48, 48, 12, 5], "stop_tokens": [[stop], [], [], []], "theta": np.inf}
    state, _ = decode_all(TARGET, DRAFTERS["chain"], RULES["mars"], prompts, lengths, **settings)
    assert committed(state) == [free[: first + 1], free, free[:12], free[:5]]


@pytest.mark.parametrize(
    ("drafter", "name"), [("chain", "mars"), ("static tree", "exact"), ("sampled chain", "mars over block")]
)
def test_slots_past_the_length_are_never_read(drafter, name):
    prompts, lengths = ragged([1, 2, 3, 18], 48, VOCAB)
    # Use two stop tokens, as `decode_all` does, to run its program.
    decoder, state = begin(
        TARGET, DRAFTERS[drafter], RULES[name], prompts, lengths, stop_tokens=[NO_TOKEN, NO_TOKEN]
    )
    caches = []

    def poison(leaf):
        """Fill the slots of a cache, starting at the last token of each prompt."""
        if not isinstance(leaf, KVCache):
            return leaf
        caches.append(leaf)
        written = jnp.arange(leaf.slots)[None] < lengths[:, None] - 1
        return jax.tree.map(lambda x: jnp.where(written[:, :, None, None], x, 1_000_003), leaf)

    dirty = jax.tree.map(poison, state, is_leaf=lambda leaf: isinstance(leaf, KVCache))
    tokens = jnp.where(jnp.arange(48)[None] < lengths[:, None], state.tokens, 77)
    dirty = dataclasses.replace(dirty, tokens=tokens)
    assert len(caches) == 2, "one of the target and one of the draft"
    # `run` donates the buffers of its state.
    dirty = jax.tree.map(jnp.copy, dirty)
    clean_state, clean_counters = decode.run(decoder, NO_WEIGHTS, state)
    dirty_state, dirty_counters = decode.run(decoder, NO_WEIGHTS, dirty)
    assert committed(dirty_state) == committed(clean_state)
    # A wrong draft of a greedy row changes no token, only the number of accepted drafts.
    jax.tree.map(np.testing.assert_array_equal, dirty_counters, clean_counters)


def test_chunked_prefill_equals_one_forward():
    prompts, lengths = ragged([1, 15, 16, 17, 39], 40, VOCAB)
    controls, keys = make_controls(5, limit=40), keys_from_seeds(np.arange(5, dtype=np.uint32))
    batch = Prompts(prompts, lengths, controls, verify.exact(), keys)
    caches = []
    for chunk in (7, 16, 64):
        decoder = decode.speculative_decoder(TARGET, drafters.none(), verify.exact(), prefill_chunk=chunk)
        caches.append(decode.start(decoder, NO_WEIGHTS, batch).cache)
    for row, n in enumerate(lengths.tolist()):
        for cache in caches[:2]:
            np.testing.assert_array_equal(cache.k[0][row, : n - 1], caches[2].k[0][row, : n - 1])
            np.testing.assert_array_equal(cache.v[0][row, : n - 1], caches[2].v[0][row, : n - 1])


def test_values_that_change_compile_nothing():
    prompts, lengths = ragged([3, 9], 32, VOCAB)

    def once(seed, lengths, theta=0.9, max_relaxed_run=9, **settings):
        rule = verify.mars(theta=theta, max_relaxed_run=max_relaxed_run)
        seeds = [seed, seed + 1]
        decode.run(decoder, NO_WEIGHTS, begin(*pair, rule, prompts, lengths, seeds=seeds, **settings)[1])

    pair = TARGET, DRAFTERS["ngram"]
    decoder = decode.speculative_decoder(*pair, verify.mars(), prefill_chunk=16)
    once(0, lengths, stop_tokens=[1, 2])
    cache_sizes = decode.run._cache_size(), decode.start_ready._cache_size()
    filters = {"top_k": 3, "top_p": 0.7, "min_p": 0.1, "strict": [True, False], "temperature": 0.8}
    once(1, lengths + 5, limit=[20, 31], theta=0.5, stop_tokens=[3, 4], **filters)
    once(2, lengths - 2, temperature=[0.0, 2.0], theta=[np.inf, 0.8], max_relaxed_run=1, stop_tokens=[1, 2])
    assert (decode.run._cache_size(), decode.start_ready._cache_size()) == cache_sizes


def test_the_caller_keeps_its_arrays():
    """`run` and `stream` donate the state, which must not share buffers with the caller's arrays."""
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    # The shapes are those of the test above, whose compiled program is reused.
    controls = make_controls(2, limit=32, stop_tokens=[1, 2])
    keys, rule = keys_from_seeds(jnp.arange(2, dtype=jnp.uint32)), verify.mars(theta=0.9, max_relaxed_run=9)
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], rule, prefill_chunk=16)
    for consume in (decode.run, lambda *arguments: next(decode.stream(*arguments))):
        state = decoder.init(NO_WEIGHTS, Prompts(prompts, lengths, controls, rule, keys))
        consume(decoder, NO_WEIGHTS, state)
    assert not any(x.is_deleted() for x in jax.tree.leaves((prompts, lengths, controls, keys)))


@pytest.mark.slow
def test_the_step_embeds_in_a_program_of_its_user():
    """The step works in a jitted scan, and in a vmap, where every `cond` over rows becomes a select."""
    batches = [ragged([3, 9], 32, VOCAB, seed=seed) for seed in (0, 1)]
    seeds, settings = [[0, 1], [2, 3]], {"temperature": [0.0, 1.0]}
    rule = verify.mars(theta=0.5)
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["chain"], rule, prefill_chunk=16)

    @jax.jit
    def sample(prompts, lengths, keys):
        controls = make_controls(2, limit=32, **settings)
        state = decoder.init(NO_WEIGHTS, Prompts(prompts, lengths, controls, rule, keys))
        state, info = jax.lax.scan(lambda s, _: decoder.step(NO_WEIGHTS, s), state, length=29)
        return state.tokens, jnp.sum(info.num_emitted, axis=0)

    keys = [keys_from_seeds(jnp.asarray(seed, jnp.uint32)) for seed in seeds]
    stacked = [jnp.stack(arrays) for arrays in zip(*batches, strict=True)]
    together, emitted = jax.vmap(sample)(*stacked, jnp.stack(keys))
    assert emitted.tolist() == [[29, 23]] * 2
    for i, (prompts, lengths) in enumerate(batches):
        batch = (TARGET, DRAFTERS["chain"], rule, prompts, lengths)
        state, stats = decode_all(*batch, seeds=seeds[i], **settings)
        assert int(np.sum(stats.accepted_relaxed)) > 0
        assert sample(prompts, lengths, keys[i])[0].tolist() == together[i].tolist() == committed(state)


PROCESS_SETTINGS = {
    # Training code often sets "rbg", whose draws for one row of a batch depend on the others.
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("setting", slow_but(PROCESS_SETTINGS, "rbg"))
def test_another_default_prng_and_x64_change_nothing(setting):
    settings = {"temperature": [0.0, 0.9, 0.0, 0.9], "top_k": [0, 5, 0, 5]}
    batch = TARGET, DRAFTERS["sampled chain"], RULES["mars over block"], *ragged([1, 2, 19, 30], 48, VOCAB)
    expected = committed(decode_all(*batch, **settings)[0])
    with PROCESS_SETTINGS[setting]():
        assert committed(decode_all(*batch, **settings)[0]) == expected


def test_vocabularies_are_checked_when_paired():
    larger = fake.hash_model(vocab_size=VOCAB + 2)
    with pytest.raises(MarsError, match="vocabulary of 15 tokens and the target one of 13"):
        decode.speculative_decoder(TARGET, drafters.language_model(larger, 3), verify.exact())


@pytest.mark.slow
def test_a_draft_whose_vocabulary_is_padded_differently_drafts_where_the_caller_says_so():
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    for size in (VOCAB + 2, VOCAB - 2):
        drafter = drafters.language_model(fake.hash_model(vocab_size=size), 3, vocab_size=VOCAB)
        state, _ = decode_all(TARGET, drafter, verify.exact(), prompts, lengths)
        assert committed(state) == committed(autoregressive(prompts, lengths))


class Padded(drafters.ngram):
    sparse = False


@pytest.mark.parametrize("rule", slow_but(["exact", "mars", "rejection", "mars over rejection"], "exact"))
def test_a_step_without_a_draft_is_the_same_step(rule):
    """On a CPU, if no row has a draft, a step runs only the root. Compare with steps that always run the padding."""
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    runs = []
    for drafter in (drafters.ngram(4), Padded(4)):
        decoder, state = begin(TARGET, drafter, RULES[rule], prompts, lengths, temperature=[0.0, 1.0])
        runs.append([])
        for stepped, info in decode.stream(decoder, NO_WEIGHTS, state):
            runs[-1].append(jax.tree.map(np.asarray, (info, stepped.tokens, stepped.length, stepped.rule)))
    jax.tree.map(np.testing.assert_array_equal, *runs)
    proposed = [info.num_proposed.sum() for info, *_ in runs[0]]
    assert min(proposed) == 0 < max(proposed), "both forms ran"


def test_a_cpu_runs_only_the_root_in_steps_without_a_draft():
    widths, length = [], 3

    def forward(params, tokens, visible, cache):
        # Forwards of the prompt are wider.
        if tokens.shape[1] <= 1 + length:
            jax.debug.callback(lambda width=tokens.shape[1]: widths.append(width))
        return TARGET.forward(params, tokens, visible, cache)

    # Repeated tokens, which an n-gram drafter copies, until the target emits others.
    prompts = jnp.zeros((1, 32), jnp.int32).at[0, :9].set(jnp.asarray([1, 2, 3, 1, 2, 3, 1, 2, 3]))
    model, lengths = TARGET._replace(forward=forward), jnp.asarray([9], jnp.int32)
    decoder, state = begin(model, drafters.ngram(length), verify.exact(), prompts, lengths)
    jax.effects_barrier()
    widths.clear()
    expected = []
    for _, info in decode.stream(decoder, NO_WEIGHTS, state):
        expected.append(1 + length if int(info.num_proposed[0]) else 1)
    jax.effects_barrier()
    assert widths == expected and set(expected) == {1, 1 + length}


SETUPS = {
    "a chain, exact": (drafters.language_model(SMALL, 4), verify.exact()),
    "a tree, mars": (drafters.language_model(SMALL, tree=(3, 2, 1)), verify.mars(theta=0.5)),
    "a rule with state": (drafters.ngram(4), contrib.budget(gap=1.0)),
}


def started(drafter, rule):
    prompts, lengths = ragged([2, 9, 17], 48, VOCAB)
    settings = {"limit": [48, 30, 40], "temperature": [0.0, 1.0, 0.7], "stop_tokens": [[3], [], [5, 6]]}
    return begin(TARGET, drafter, rule, prompts, lengths, **settings)


@pytest.mark.parametrize("setup", slow_but(SETUPS, "a rule with state"))
def test_steps_past_the_end_change_nothing(setup):
    runs = []
    for ahead in (0, decode.AHEAD):
        decoder, first = started(*SETUPS[setup])
        stats, steps = zero_stats(3, decoder.max_depth, record=48), []
        for state, info in decode.stream(decoder, NO_WEIGHTS, first, ahead=ahead):
            stats = accumulate(stats, info, state.length)
            steps.append(jax.device_get(info))
        fields = ("tokens", "length", "done", "failed", "rule")
        runs.append((steps, stats, [getattr(state, name) for name in fields]))
    (steps, *results), (ahead_steps, *ahead_results) = runs
    assert steps[-1].num_emitted.any() and len(ahead_steps) == len(steps) + decode.AHEAD
    assert not any(info.num_emitted.any() for info in ahead_steps[len(steps) :])
    jax.tree.map(np.testing.assert_array_equal, (ahead_steps[: len(steps)], ahead_results), (steps, results))


def test_only_accelerators_run_ahead_of_the_host():
    _, state = started(*SETUPS["a chain, exact"])
    assert decode.look_ahead(state) == 0
    tpu = types.SimpleNamespace(devices=lambda: [types.SimpleNamespace(platform="tpu")])
    assert decode.look_ahead(types.SimpleNamespace(done=tpu)) == decode.AHEAD


def test_a_negative_number_of_steps_ahead_is_refused():
    decoder, state = started(*SETUPS["a chain, exact"])
    with pytest.raises(MarsError, match="ahead is -1: expected a whole number of at least 0"):
        next(decode.stream(decoder, NO_WEIGHTS, state, ahead=-1))
