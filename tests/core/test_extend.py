"""A state that goes on with other prompts: tokens, drafts and counters of a fresh one, and only what is new is read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import parse_mesh
from mars_jax.core.types import Prompts, keys_from_seeds
from tests.helpers import NO_WEIGHTS, committed, slow_but
from tests.helpers.every_drafter import BUFFER, CHUNK, HEADS, PLAIN, ROWS, TRUSTED, check_same, made_of
from tests.helpers.fake_drafters import TARGET

FIRST = [5, 2, 17]  # tokens of the first prompts
# Rows of a turn: sampled, greedy, and sampled harder.
TEMPERATURES = [0.9, 0.0, 1.3]


class Reads(list):
    """A model that notes the first position of every forward of a chunk, of whatever rows there are."""

    @functools.cache  # noqa: B019 one object, so that what is compiled for it is found again
    def of(self, model):
        def forward(params, tokens, visible, cache):
            if tokens.shape[1] == CHUNK:
                jax.debug.callback(lambda at: self.append(np.asarray(at).tolist()), visible.slot)
            return model.forward(params, tokens, visible, cache)

        features = model.with_features
        return model._replace(
            forward=forward, with_features=features and (lambda layers: self.of(features(layers)))
        )

    __hash__ = object.__hash__


class Talk:
    """Turns over one state."""

    def __init__(self, name, rule, *, target=None):
        own, self.drafter, self.params, self.vocab = made_of(name)
        made = self.drafter
        if isinstance(made, drafters.LoadedDrafter):
            self.drafter = made.drafter
            self.decoder = dataclasses.replace(made.decoder(target or own, rule), prefill_chunk=CHUNK)
        else:
            self.decoder = decode.speculative_decoder(target or own, made, rule, prefill_chunk=CHUNK)
        self.rule, self.state = rule, None
        self.rng = np.random.default_rng(0)

    def new(self, count):
        return self.rng.integers(0, self.vocab, count).tolist()

    def arrays(self, texts, more):
        prompts = np.zeros((ROWS, BUFFER), np.int32)
        lengths = np.array([len(text) for text in texts], np.int32)
        for row, text in enumerate(texts):
            prompts[row, : len(text)] = text
        controls = make_controls(
            ROWS, limit=np.minimum(lengths + more, BUFFER), temperature=TEMPERATURES, stop_tokens=[[3]] * ROWS
        )
        keys = keys_from_seeds(jnp.arange(ROWS, dtype=jnp.uint32))
        return jnp.asarray(prompts), jnp.asarray(lengths), controls, self.rule, keys

    def turn(self, texts, more=9, steps=99):
        """(texts, counters) of the running state and of a fresh one, and how many tokens the former read of each."""
        given = self.arrays(texts, more)
        fresh = decode.start(self.decoder, self.params, Prompts(*given))
        if self.state is None:
            self.state, read = decode.start(self.decoder, self.params, Prompts(*given)), None
        else:
            self.state, read = decode.extend(self.decoder, self.params, self.state, Prompts(*given))
        found = []
        for state in (fresh, self.state):
            self.state, stats = decode.run(self.decoder, self.params, state, record=True, max_steps=steps)
            found.append((committed(self.state), jax.tree.map(np.asarray, stats)))
        return found, None if read is None else read.tolist()

    @property
    def texts(self):
        return committed(self.state)


def conversation(talk):
    """Four turns: more of every text, another middle of one, a text that is shorter than what was held, and nothing
    new. Gives the beginning that each row holds of its prompt, the prompts' lengths, and what was found."""
    talk.turn([talk.new(n) for n in FIRST])
    for change in range(4):
        before = talk.texts
        texts = [text + talk.new(extra) for text, extra in zip(before, (3, 1, 7), strict=True)]
        if change == 1:
            texts[2] = [*texts[2][:11], (texts[2][11] + 1) % talk.vocab, *texts[2][12:]]
        if change == 2:
            texts[0] = before[0][:7]
        if change == 3:
            texts = before
        held = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for x, y in zip(before, texts, strict=True)
        ]
        # Stopped after a step, the rows are not done, and no step has fed the draft their last tokens again.
        found, read = talk.turn(texts, more=6, steps=99 if change % 2 else 1)
        yield change, before, held, texts, found, read


IN_TIME = ("none", "model, dynamic tree")


@pytest.mark.parametrize("name", slow_but([*PLAIN, *TRUSTED, *HEADS], *IN_TIME))
def test_every_turn_decodes_as_a_fresh_state(name):
    """Tokens, steps, drafts and what each token was: so the draft's own state is that of a fresh one too."""
    rule = verify.rejection() if "sampled" in name else verify.mars(theta=0.5)
    talk = Talk(name, rule)
    for change, before, held, texts, found, read in conversation(talk):
        check_same(*found)
        again = talk.drafter.reads is not None
        wanted = [
            len(text) - 1 - min(h - again, len(old) - 1, len(text) - 1 - again)
            for text, old, h in zip(texts, before, held, strict=True)
        ]
        assert read == wanted, change
        assert max(read) <= 1 + again + max(len(t) - h for t, h in zip(texts, held, strict=True))


@pytest.mark.slow
def test_a_draft_as_long_as_pays_says_the_same():
    """What it expects of its drafts it remembers, so its steps are others."""
    talk = Talk("sized", verify.exact())
    for *_, (fresh, found), _ in conversation(talk):
        for ours, theirs in zip(found[0], fresh[0], strict=True):
            both = min(len(ours), len(theirs))  # one step of a size may say more than one of another
            assert ours[:both] == theirs[:both]


def test_what_is_held_goes_through_no_forward():
    """Counted where the target is run, in chunks of 16, of which a fresh state of so many tokens takes three."""
    reads = Reads()
    talk = Talk("model chain", verify.exact(), target=reads.of(TARGET))
    talk.turn([talk.new(33)] * ROWS, more=2)
    texts = [text + talk.new(4) for text in talk.texts]
    given = talk.arrays(texts, 2)
    jax.effects_barrier()
    reads.clear()
    state, read = decode.extend(talk.decoder, talk.params, talk.state, Prompts(*given))
    jax.block_until_ready(state.tokens)
    jax.effects_barrier()
    assert reads == [[len(text) - 5 for text in texts]] and read.tolist() == [4] * ROWS
    reads.clear()
    jax.block_until_ready(decode.start(talk.decoder, talk.params, Prompts(*given)).tokens)
    jax.effects_barrier()
    assert sorted(at[0] for at in reads) == [0, 16, 32]


@pytest.mark.slow
def test_turns_share_one_compilation():
    talk = Talk("ngram of 6", verify.mars(theta=0.25))  # a drafter that no other test compiles for
    talk.turn([talk.new(n) for n in FIRST])
    extended = decode._extend._cache_size()
    for _ in range(3):
        talk.turn([text + talk.new(2) for text in talk.texts], more=4)
    assert decode._extend._cache_size() == extended + 1


def test_a_drafter_that_says_nothing_of_its_cache_reads_the_text_again():
    """Its first state is that of a fresh row, so its drafts are too."""
    forgetful = PLAIN["model chain"]._replace(catch_up=None)
    decoder = decode.speculative_decoder(TARGET, forgetful, verify.mars(theta=0.5), prefill_chunk=CHUNK)
    talk = Talk("model chain", verify.mars(theta=0.5))
    talk.decoder, talk.drafter = decoder, forgetful
    for *_, found, _ in conversation(talk):
        check_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model chain", pytest.param("eagle tree", marks=pytest.mark.slow)])
def test_rows_go_on_where_a_mesh_has_them(name):
    talk, plain = Talk(name, verify.mars(theta=0.5)), Talk(name, verify.mars(theta=0.5))

    def two(talk):
        def pair(texts):
            given = talk.arrays(texts, 6)
            return jax.tree.map(lambda x: x[:2] if getattr(x, "ndim", 0) else x, given)

        state = decode.start(talk.decoder, talk.params, Prompts(*pair([talk.new(5), talk.new(9), [1]])))
        state, _ = decode.run(talk.decoder, talk.params, state)
        texts = [text + talk.new(3) for text in committed(state)]
        state, read = decode.extend(talk.decoder, talk.params, state, Prompts(*pair([*texts, [1]])))
        state, _ = decode.run(talk.decoder, talk.params, state)
        return committed(state), read.tolist()

    with jax.set_mesh(parse_mesh("data=2")):
        divided = two(talk)
    assert divided == two(plain)


def test_as_many_prompts_as_rows():
    talk = Talk("none", verify.exact())
    talk.turn([talk.new(n) for n in FIRST])
    prompts, lengths, controls, rule, keys = talk.arrays(talk.texts, 4)
    with pytest.raises(MarsError, match=r"the prompts are \[3, 73\] and the state has 3 rows of 72 tokens"):
        wide = jnp.pad(prompts, ((0, 0), (0, 1)))
        talk.decoder.extend(NO_WEIGHTS, talk.state, Prompts(wide, lengths, controls, rule, keys))
    with pytest.raises(MarsError, match=r"the prompts are \[2, 72\]"):
        few = make_controls(2, limit=8)
        talk.decoder.extend(NO_WEIGHTS, talk.state, Prompts(prompts[:2], lengths[:2], few, rule, keys[:2]))
