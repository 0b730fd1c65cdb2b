"""The step and its loops, with a model that sees wrong masks, positions, slots and rollbacks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.cache import KVCache
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import accumulate, summarize, zero_stats
from mars_jax.core.tree import static_topology
from mars_jax.core.types import NO_TOKEN, Prompts, keys_from_seeds
from tests.helpers import NO_WEIGHTS, committed, decode_all, logits_after, ragged, slow_but
from tests.helpers.fake_drafters import DRAFTERS, TARGET, VOCAB

RULES = {
    "exact": verify.exact(),
    "rejection": verify.rejection(),
    "block": verify.rejection(block=True),
    "mars": verify.mars(),
    "mars over rejection": verify.mars(base=verify.rejection()),
    "mars over block": verify.mars(base=verify.rejection(block=True)),
}
PAIRS = [(d, r) for d in DRAFTERS for r in RULES if "tree" not in d or r in ("exact", "mars")]
# Every drafter, every rule, and every rule that reads the q of a sampled chain.
SOME_PAIRS = [
    ("ngram", "exact"),
    ("chain", "mars"),
    ("chain of 1", "rejection"),
    ("sampled chain", "mars over block"),
    ("static tree", "exact"),
    ("static tree", "mars"),
    ("random tree", "mars"),
]


def autoregressive(prompts, lengths, **chosen):
    return decode_all(TARGET, drafters.none(), verify.exact(), prompts, lengths, **chosen)[0]


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [pytest.param(*pair, marks=[] if pair in SOME_PAIRS else pytest.mark.slow) for pair in PAIRS],
)
def test_greedy_output_is_that_of_autoregression(drafter, rule):
    prompts, lengths = ragged([1, 2, 19, 30], 48, VOCAB)
    state, stats = decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, theta=np.inf)
    assert committed(state) == committed(autoregressive(prompts, lengths))
    assert int(stats.steps.sum()) <= int(stats.emitted.sum())


def test_autoregression_is_the_plain_loop_over_the_model():
    """The oracle of the oracle: the hash computed afresh over the whole prefix at every token."""
    prompts, lengths = ragged([1, 3, 9, 47], 48, VOCAB)
    state, stats = decode_all(TARGET, drafters.none(), verify.exact(), prompts, lengths)
    got = committed(state)
    assert got == committed(autoregressive(prompts, lengths)) and stats.tokens is None
    for row in range(4):
        tokens = prompts[row, : lengths[row]].tolist()
        while len(tokens) < 48:
            tokens.append(int(np.argmax(logits_after(TARGET, tokens, width=48))))
        assert got[row] == tokens


@pytest.mark.parametrize("drafter", ["chain", "static tree", "random tree"])
def test_drafts_are_accepted_at_depth(drafter):
    """A suite in which nothing is ever accepted would prove little."""
    prompts, lengths = ragged([4] * 4, 48, VOCAB)
    _, stats = decode_all(TARGET, DRAFTERS[drafter], RULES["mars"], prompts, lengths, theta=np.inf)
    histogram = np.asarray(stats.depth_histogram).sum(axis=0)
    assert (histogram[1:3] > 0).all()


def test_a_perfect_draft_is_accepted_in_full():
    prompts, lengths = ragged([1, 2, 5], 61, VOCAB)
    twin = drafters.language_model(TARGET, 5)
    _, stats = decode_all(TARGET, twin, verify.exact(), prompts, lengths, limit=lengths + 54)
    assert np.asarray(stats.depth_histogram).tolist() == [[0, 0, 0, 0, 0, 9]] * 3


@pytest.mark.slow
def test_a_perfect_tree_is_accepted_in_full():
    prompts, lengths = ragged([1, 2, 5], 61, VOCAB)
    twin = drafters.language_model(TARGET, tree=(3, 2, 2, 1, 1))
    _, stats = decode_all(TARGET, twin, verify.exact(), prompts, lengths, limit=lengths + 54)
    assert np.asarray(stats.depth_histogram).tolist() == [[0, 0, 0, 0, 0, 9]] * 3


MIXED = {
    "temperature": [0.0, 0.9, 1.3, 0.0], "top_k": [0, 5, 0, 0], "top_p": [1.0, 1.0, 0.8, 1.0],
    "theta": [0.5, 0.9, 0.6, 0.9],
}  # fmt: skip


ALONE = [("static tree", "mars")]


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [pytest.param(*pair, marks=[] if pair in ALONE else pytest.mark.slow) for pair in PAIRS],
)
def test_a_row_alone_equals_the_row_in_a_batch(drafter, rule):
    prompts, lengths = ragged([1, 6, 21, 30], 48, VOCAB)
    chosen = MIXED
    together, _ = decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, **chosen)
    for row in (1, 3):
        alone, _ = decode_all(
            TARGET,
            DRAFTERS[drafter],
            RULES[rule],
            prompts[row : row + 1],
            lengths[row : row + 1],
            seeds=[row],
            **{name: values[row] for name, values in chosen.items()},
        )
        assert committed(alone) == [committed(together)[row]]


def test_stream_takes_the_steps_of_run():
    prompts, lengths = ragged([2, 9, 17, 30], 48, VOCAB)
    made = make_controls(
        4, limit=[48, 30, 40, 48], temperature=[0.0, 1.0, 0.7, 0.0], stop_tokens=[[3], [], [5, 6], []]
    )
    keys = keys_from_seeds(jnp.arange(4, dtype=jnp.uint32))
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["static tree"], verify.mars(), prefill_chunk=16)
    ran, stats = decode.run(
        decoder,
        NO_WEIGHTS,
        decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, made, verify.mars(), keys)),
    )
    counted, text = (
        zero_stats(4, decoder.max_depth),
        [row[:n].tolist() for row, n in zip(prompts, lengths, strict=True)],
    )
    first = decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, made, verify.mars(), keys))
    for state, info in decode.stream(decoder, NO_WEIGHTS, first):
        counted = accumulate(counted, info, state.length)
        for row in range(4):
            text[row] += [t for t in info.emitted[row].tolist() if t != NO_TOKEN]
    assert committed(state) == committed(ran) == text
    jax.tree.map(np.testing.assert_array_equal, counted, stats)
    totals = summarize(stats)
    assert totals.accepted <= totals.emitted <= totals.accepted + totals.steps  # a cut step has no bonus
    assert totals.emitted == sum(map(len, text)) - int(lengths.sum())


def test_rows_stop_at_their_own_stop_tokens_and_limits():
    prompts, lengths = ragged([5, 5, 5, 5], 48, VOCAB, seed=3)
    prompts = jnp.broadcast_to(prompts[:1], prompts.shape)
    free = committed(autoregressive(prompts, lengths))[0]
    stop = free[20]
    first = free.index(stop, 5)
    state, _ = decode_all(
        TARGET,
        DRAFTERS["chain"],
        RULES["mars"],
        prompts,
        lengths,
        theta=np.inf,
        limit=[48, 48, 12, 5],
        stop_tokens=[[stop], [], [], []],
    )
    assert committed(state) == [free[: first + 1], free, free[:12], free[:5]]


def test_finished_and_padding_rows_change_nothing():
    prompts, lengths = ragged([4, 11], 48, VOCAB)
    alone = autoregressive(prompts, lengths)
    wide, stats = decode_all(
        TARGET,
        DRAFTERS["chain"],
        RULES["mars"],
        jnp.pad(prompts, ((0, 2), (0, 0))),
        jnp.pad(lengths, (0, 2), constant_values=1),
        theta=np.inf,
        limit=[48, 48, 1, 1],
    )
    assert committed(wide)[:2] == committed(alone)
    assert stats.steps[2:].tolist() == [0, 0] and stats.emitted[2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("drafter", "name"),
    slow_but(
        [next(pair for pair in SOME_PAIRS if pair[0] == drafter) for drafter in DRAFTERS],
        ("chain", "mars"),
        ("static tree", "exact"),
        ("sampled chain", "mars over block"),
    ),
)
def test_slots_past_the_length_are_never_read(drafter, name):
    prompts, lengths = ragged([1, 2, 3, 18], 48, VOCAB)
    rule = RULES[name]
    decoder = decode.speculative_decoder(TARGET, DRAFTERS[drafter], rule, prefill_chunk=16)
    made = make_controls(4, limit=48, stop_tokens=[NO_TOKEN, NO_TOKEN])  # the shapes of `decode_all`
    keys = keys_from_seeds(jnp.arange(4, dtype=jnp.uint32))

    poisoned = []

    def poison(cache):
        def one(buffer):
            slot = jnp.arange(buffer.shape[1])[None, :, None, None]
            return jnp.where(slot >= lengths[:, None, None, None] - 1, 1_000_003, buffer)

        if not isinstance(cache, KVCache):
            return cache
        poisoned.append(cache)
        return jax.tree.map(one, cache)

    def poison_caches(state):
        return jax.tree.map(poison, state, is_leaf=lambda x: isinstance(x, KVCache))

    state = decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, made, rule, keys))
    dirty = dataclasses.replace(
        state,
        cache=poison_caches(state.cache),
        draft=poison_caches(state.draft),
        tokens=jnp.where(jnp.arange(48)[None] >= lengths[:, None], 77, state.tokens),
    )
    assert len(poisoned) == (1 if drafter in ("ngram", "random tree") else 2)  # the target's, and the draft's
    dirty = jax.tree.map(jnp.copy, dirty)  # `run` takes its state's buffers
    clean, counted = decode.run(decoder, NO_WEIGHTS, state)
    again, recounted = decode.run(decoder, NO_WEIGHTS, dirty)
    assert committed(again) == committed(clean)
    # What a draft reads changes no token of a greedy row: only how many drafts are right.
    jax.tree.map(np.testing.assert_array_equal, recounted, counted)


def test_chunked_prefill_equals_one_forward():
    prompts, lengths = ragged([1, 15, 16, 17, 39], 40, VOCAB)
    made, keys = make_controls(5, limit=40), keys_from_seeds(jnp.arange(5, dtype=jnp.uint32))
    caches = []
    for chunk in (7, 16, 64):
        decoder = decode.speculative_decoder(TARGET, drafters.none(), verify.exact(), prefill_chunk=chunk)
        caches.append(
            decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, made, verify.exact(), keys)).cache
        )
    for row, n in enumerate(lengths.tolist()):
        for cache in caches[:2]:
            np.testing.assert_array_equal(cache.k[0][row, : n - 1], caches[2].k[0][row, : n - 1])
            np.testing.assert_array_equal(cache.v[0][row, : n - 1], caches[2].v[0][row, : n - 1])


def test_weights_that_are_no_numbers_end_the_row_and_say_so():
    broken = TARGET._replace(unembed=lambda params, hidden: TARGET.unembed(params, hidden) * jnp.nan)
    prompts, lengths = ragged([3, 4], 16, VOCAB)
    state, stats = decode_all(broken, drafters.ngram(2), verify.exact(), prompts, lengths)
    assert state.failed.tolist() == [True, True]
    assert state.length.tolist() == [3, 4] and stats.emitted.tolist() == [0, 0]


def test_values_that_change_compile_nothing():
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], verify.mars(), prefill_chunk=8)

    def once(seed, lengths, theta=0.9, max_relaxed_run=9, **chosen):
        made = make_controls(2, stop_tokens=[1, 2], **chosen)
        keys = keys_from_seeds(jnp.asarray([seed, seed + 1], jnp.uint32))
        rule = verify.mars(theta=theta, max_relaxed_run=max_relaxed_run)
        state = decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, made, rule, keys))
        decode.run(decoder, NO_WEIGHTS, state)

    once(0, lengths, limit=32)
    before = decode.run._cache_size(), decode._start._cache_size()
    once(
        1,
        lengths + 5,
        limit=[20, 31],
        temperature=0.8,
        theta=0.5,
        top_k=3,
        top_p=0.7,
        min_p=0.1,
        strict=[True, False],
    )
    once(2, lengths - 2, limit=30, temperature=[0.0, 2.0], theta=[np.inf, 0.8], max_relaxed_run=1)
    assert (decode.run._cache_size(), decode._start._cache_size()) == before


def test_equal_arguments_give_the_same_decoder():
    first = decode.speculative_decoder(TARGET, drafters.ngram(3), verify.mars(theta=0.9))
    assert decode.speculative_decoder(TARGET, drafters.ngram(3), verify.mars(theta=0.5)) == first


def test_the_step_embeds_in_a_program_of_its_user():
    """Inside a jitted function, a scan and a vmap over batches."""
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["chain"], verify.exact(), prefill_chunk=16)

    @jax.jit
    def sample(prompts, lengths, keys):
        state = decoder.init(
            NO_WEIGHTS, Prompts(prompts, lengths, make_controls(2, limit=32), verify.exact(), keys)
        )
        state, info = jax.lax.scan(lambda s, _: decoder.step(NO_WEIGHTS, s), state, length=29)
        return state.tokens, info.num_emitted

    keys = keys_from_seeds(jnp.arange(2, dtype=jnp.uint32))
    tokens, emitted = sample(prompts, lengths, keys)
    want = committed(autoregressive(prompts, lengths))
    assert tokens.tolist() == want and emitted.sum(axis=0).tolist() == [29, 23]
    stacked, _ = jax.vmap(sample)(prompts[None], lengths[None], keys[None])
    assert stacked[0].tolist() == want


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), [("chain", "mars"), ("sampled chain", "mars over rejection")])
def test_a_relaxed_step_under_vmap_gives_the_tokens_of_each_batch(drafter, rule):
    """Under `vmap` the kernels are batched once more, and every `cond` over rows becomes a select."""
    made = [ragged([3, 9], 32, VOCAB, seed=seed) for seed in (0, 1)]
    chosen = {"temperature": [0.0, 1.0], "theta": [0.5, 0.6]}
    seeds = [[0, 1], [2, 3]]
    alone = [
        decode_all(TARGET, DRAFTERS[drafter], RULES[rule], *batch, seeds=seed, **chosen)
        for batch, seed in zip(made, seeds, strict=True)
    ]
    assert all(int(np.sum(stats.accepted_relaxed)) > 0 for _, stats in alone)

    def decoded(prompts, lengths, seeds):
        state, stats = decode_all(
            TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, seeds=seeds, **chosen
        )
        return state.tokens, state.length, stats.steps

    stacked = (jnp.stack([batch[i] for batch in made]) for i in (0, 1))
    tokens, length, steps = jax.jit(jax.vmap(decoded))(*stacked, jnp.asarray(seeds, jnp.uint32))
    for i, (state, stats) in enumerate(alone):
        assert [t[:n].tolist() for t, n in zip(tokens[i], length[i], strict=True)] == committed(state)
        np.testing.assert_array_equal(steps[i], stats.steps)


@pytest.mark.parametrize(
    ("drafter", "rule", "impl"),
    [
        ("sampled chain", "mars over block", "rbg"),
        pytest.param("sampled chain", "rejection", "unsafe_rbg", marks=pytest.mark.slow),
        pytest.param("chain", "mars", "rbg", marks=pytest.mark.slow),
        pytest.param("chain", "mars", "unsafe_rbg", marks=pytest.mark.slow),
    ],
)
def test_another_default_prng_changes_nothing(impl, drafter, rule):
    """Training code often sets "rbg", whose draws for one row of a batch depend on the others."""
    prompts, lengths = ragged([1, 2, 19, 30], 48, VOCAB)
    chosen = {"temperature": [0.0, 0.9, 0.0, 0.9], "top_k": [0, 5, 0, 5]}
    want = committed(decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, **chosen)[0])
    with jax.default_prng_impl(impl):
        got = decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, **chosen)[0]
    assert committed(got) == want


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_mars_over_sampled_rows_emits_what_filters_exclude(filters):
    """As its docstring says: margins are of the raw logits, and the runner-up may be what a filter took out."""
    prompts, lengths = ragged([1, 4, 9, 17], 48, VOCAB)
    strict, relaxed = (
        decode_all(
            TARGET,
            DRAFTERS["chain"],
            RULES["mars"],
            prompts,
            lengths,
            temperature=1.0,
            theta=theta,
            **filters,
        )
        for theta in (np.inf, 0.5)
    )
    greedy = committed(autoregressive(prompts, lengths))
    assert committed(strict[0]) == greedy  # each of these filters leaves the best token alone
    assert int(np.sum(relaxed[1].accepted_relaxed)) > 0
    excluded = 0
    for row, text in enumerate(committed(relaxed[0])):
        for at in range(int(lengths[row]), len(text)):
            best = np.argsort(logits_after(TARGET, text[:at], width=48))[::-1]
            assert text[at] in best[:2]
            excluded += int(text[at] != best[0])
    assert excluded == int(np.sum(relaxed[1].accepted_relaxed))


def test_vocabularies_are_checked_when_paired():
    other = fake.hash_model(vocab_size=VOCAB + 2)
    with pytest.raises(MarsError, match="vocabulary of 15 tokens and the target one of 13"):
        decode.speculative_decoder(TARGET, drafters.language_model(other, 3), verify.exact())


@pytest.mark.slow
def test_a_draft_whose_vocabulary_is_padded_differently_drafts_where_the_caller_says_so():
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    for size in (VOCAB + 2, VOCAB - 2):
        drafter = drafters.language_model(fake.hash_model(vocab_size=size), 3, vocab_size=VOCAB)
        state, _ = decode_all(TARGET, drafter, verify.exact(), prompts, lengths)
        assert committed(state) == committed(autoregressive(prompts, lengths))


def test_static_topology_is_breadth_first():
    parents, depths = static_topology((2, 2))
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2] and depths.tolist() == [0, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("loop", slow_but(["run", "stream"], "run"))
def test_the_caller_keeps_its_arrays(loop):
    """`run` and `stream` donate the state, which must not hold what the caller gave."""
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    made, keys = make_controls(2, limit=32), keys_from_seeds(jnp.arange(2, dtype=jnp.uint32))
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], verify.exact())
    for _ in range(2):
        state = decoder.init(NO_WEIGHTS, Prompts(prompts, lengths, made, verify.exact(), keys))
        if loop == "run":
            decode.run(decoder, NO_WEIGHTS, state)
        else:
            next(decode.stream(decoder, NO_WEIGHTS, state))
    assert not any(x.is_deleted() for x in jax.tree.leaves((prompts, lengths, made, keys)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [("ngram", "exact"), ("static tree", "mars"), ("sampled chain", "mars over block")],
)
def test_x64_mode_changes_nothing(drafter, rule):
    prompts, lengths = ragged([1, 2, 19, 30], 48, VOCAB)  # the shapes of the tests above, compiled already
    chosen = {"temperature": [0.0, 0.9, 0.0, 0.9], "top_k": [0, 5, 0, 5]}
    want = committed(decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, **chosen)[0])
    with jax.enable_x64(True):
        got = decode_all(TARGET, DRAFTERS[drafter], RULES[rule], prompts, lengths, **chosen)[0]
        assert committed(got) == want


@pytest.mark.parametrize("rule", slow_but(["exact", "mars", "rejection", "mars over rejection"], "exact"))
def test_a_step_without_a_draft_is_the_same_step(rule):
    """The short form that a CPU runs where no row has a draft, against the one that runs over the padding."""
    prompts, lengths = ragged([3, 9], 32, VOCAB)
    found = []
    for drafter in (drafters.ngram(4), drafters.ngram(4)._replace(traits=())):
        decoder = decode.speculative_decoder(TARGET, drafter, RULES[rule], prefill_chunk=16)
        made = make_controls(2, limit=32, temperature=[0.0, 1.0])
        keys = keys_from_seeds(jnp.arange(2, dtype=jnp.uint32))
        state = decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, made, RULES[rule], keys))
        found.append([])
        for after, info in decode.stream(decoder, NO_WEIGHTS, state):
            found[-1].append(jax.tree.map(np.asarray, (info, after.tokens, after.length, after.rule)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    proposed = [info.num_proposed.sum() for info, *_ in found[0]]
    assert min(proposed) == 0 < max(proposed)  # both forms ran


@pytest.mark.parametrize("length", slow_but([1, 3], 1))
def test_on_a_cpu_the_short_form_runs_exactly_where_no_row_has_a_draft(length):
    widths = []

    def forward(params, tokens, visible, cache):
        if tokens.shape[1] <= 1 + length:  # and not of the prompt
            jax.debug.callback(lambda width=tokens.shape[1]: widths.append(width))
        return TARGET.forward(params, tokens, visible, cache)

    decoder = decode.speculative_decoder(
        TARGET._replace(forward=forward), drafters.ngram(length), verify.exact(), prefill_chunk=16
    )
    # Tokens that repeat, so that there is something to copy, and such as do not.
    prompts = jnp.zeros((1, 32), jnp.int32).at[0, :9].set(jnp.asarray([1, 2, 3, 1, 2, 3, 1, 2, 3]))
    keys = keys_from_seeds(jnp.zeros(1, jnp.uint32))
    controls = make_controls(1, limit=32)
    lengths = jnp.asarray([9], jnp.int32)
    state = decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, controls, verify.exact(), keys))
    jax.effects_barrier()
    widths.clear()
    expected = []
    for _, info in decode.stream(decoder, NO_WEIGHTS, state):
        expected.append(1 + length if int(info.num_proposed[0]) else 1)
    jax.effects_barrier()
    assert widths == expected and set(expected) == {1, 1 + length}


def test_a_cpu_is_not_let_ahead():
    decoder = decode.speculative_decoder(TARGET, drafters.none(), verify.exact(), prefill_chunk=16)
    prompts, lengths = ragged([3], 8, VOCAB)
    keys = keys_from_seeds(jnp.zeros(1, jnp.uint32))
    state = decode.start(
        decoder, NO_WEIGHTS, Prompts(prompts, lengths, make_controls(1, limit=8), verify.exact(), keys)
    )
    assert decode.look_ahead(state) == 0
