"""What cannot be meant is refused where it is given, by a sentence that names the argument, before anything runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, refill
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import zero_stats
from mars_jax.core.rule import structure
from mars_jax.core.types import Prompts, keys_from_seeds
from tests.helpers import NO_WEIGHTS, committed
from tests.helpers.fake_drafters import DRAFTERS, SMALL, TARGET, VOCAB

ROWS, BUFFER, WIDTH = 3, 12, 8
RULE = verify.mars(theta=0.5)
DECODER = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], RULE, prefill_chunk=8)


def arrays(count, width=WIDTH):
    return {
        "prompts": jnp.full((count, width), 5, jnp.int32),
        "lengths": jnp.full((count,), 4, jnp.int32),
        "controls": make_controls(count, limit=BUFFER),
        "rule": RULE,
        "keys": keys_from_seeds(jnp.arange(count, dtype=jnp.uint32)),
    }


def nothing(x):
    """Zeros in a shape, or keys."""
    return (
        keys_from_seeds(jnp.arange(ROWS))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else jnp.zeros(x.shape, x.dtype)
    )


@functools.cache
def state():
    """What is refused never looks into it."""
    return jax.tree.map(nothing, decode.shapes(DECODER, NO_WEIGHTS, Prompts(*arrays(ROWS, BUFFER).values())))


def ask(way, **changes):
    """Call one of the ways in with something changed: to a value, or by a function of what is usual."""
    given = {"state": state(), "stats": zero_stats(ROWS, DECODER.max_depth), "rows": jnp.asarray([1])}
    given |= arrays(ROWS if way == "extend" else 1)
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) and name != "rule" else change
    held, stats, rows, *new = given.values()
    if way == "extend":
        return decode.extend(DECODER, NO_WEIGHTS, held, Prompts(*new))
    if way == "insert":
        return DECODER.insert(NO_WEIGHTS, held, rows, Prompts(*new))
    return refill.refill(DECODER, NO_WEIGHTS, held, stats, rows, Prompts(*new))


def at(x, value):
    return x.at[0].set(value)


def twice(tree):
    return jax.tree.map(lambda x: jnp.concatenate([x, x]), tree)


ANYWHERE = [
    ("lengths", lambda x: at(x, 0), "a prompt has the length 0: expected 1 to 8"),
    ("lengths", lambda x: at(x, -1), "a prompt has the length -1: expected 1 to 8"),
    ("lengths", lambda x: at(x, 99), "a prompt has the length 99: expected 1 to 8"),
    ("lengths", lambda x: at(x, 9), "a prompt has the length 9: expected 1 to 8"),
    ("lengths", lambda x: x.astype(jnp.float32), "lengths are float32.*: expected an array of whole numbers"),
    ("lengths", lambda x: x > 0, "lengths are bool.*: expected an array of whole numbers"),
    ("lengths", lambda x: x[:, None], r"lengths are int32\[., 1\]: expected an array of whole numbers"),
    ("lengths", lambda x: x[0], r"lengths are int32\[\]: expected an array of whole numbers"),
    ("lengths", lambda x: x.tolist(), "lengths are of type list: expected an array of whole numbers"),
    ("lengths", twice, "there are . lengths for . prompts: give one for each"),
    ("prompts", lambda x: x.astype(jnp.float32), "prompts are float32.*: expected an array of whole numbers, token"),
    ("prompts", lambda x: x > 0, "prompts are bool.*: expected an array of whole numbers"),
    ("prompts", lambda x: x[0], r"prompts are int32\[8\]: expected an array of whole numbers"),
    ("prompts", lambda x: x[None], r"prompts are int32\[1, ., 8\]: expected an array of whole numbers"),
    ("prompts", lambda x: x.tolist(), "prompts are of type list: expected an array of whole numbers"),
    ("prompts", lambda x: x.at[0, 3].set(VOCAB), "a prompt has the token 13: expected ids of 0 to 12"),
    ("prompts", lambda x: x.at[0, 0].set(-1), "a prompt has the token -1: expected ids of 0 to 12"),
    ("controls", twice, "temperature of the controls has shape .* for . prompts: make the controls with make_controls"),
    ("controls", lambda x: {"limit": 8}, "controls is a dict: expected what make_controls"),
    ("keys", twice, "keys have shape .* for . prompts: give keys_from_seeds a seed for each"),
    ("keys", lambda x: jnp.zeros((x.shape[0], 2), jnp.uint32), "keys are of dtype uint32: expected typed keys"),
    ("keys", lambda x: [0] * x.shape[0], "keys are of dtype list: expected typed keys"),
    ("rule", verify.exact(), "the rule exact is not of the structure"),
    ("rule", verify.mars(theta=[0.5] * 5), "theta of the rule has shape .5,.: expected one number, or one for each"),
    ("state", lambda x: x.cache, "state is of type KVCache: expected what decode.start or Decoder.init gives"),
]  # fmt: skip
INSERTED = [
    ("rows", [3], "rows are .3.: expected each of 0 to 2 at most once, or -1 for none"),
    ("rows", [-2], "rows are .-2.: expected each of 0 to 2 at most once"),
    ("rows", [1.0], r"rows are float32\[1\]: expected an array of whole numbers"),
    ("rows", [True], r"rows are bool\[1\]: expected an array of whole numbers"),
    ("rows", [[1]], r"rows are int32\[1, 1\]: expected an array of whole numbers"),
    ("rows", 1, r"rows are int32\[\]: expected an array of whole numbers"),
    ("rows", [0, 1], "there are 2 rows for 1 prompts: name one for each"),
    ("prompts", (1, BUFFER + 1), "the prompts are 13 wide and the state's token buffer 12: cut them"),
    ("controls", {"temperature": None}, "the rows have a temperature and the state has none, or the other way round"),
]  # fmt: skip
CASES = [(way, *case) for way in ("insert", "refill", "extend") for case in ANYWHERE]
CASES += [(way, *case) for way in ("insert", "refill") for case in INSERTED]


@pytest.mark.parametrize(
    ("way", "name", "change", "sentence"), CASES, ids=[f"{way} with {name}" for way, name, *_ in CASES]
)
def test_what_cannot_be_meant_gets_a_sentence(way, name, change, sentence):
    if name == "rows":
        change = jnp.asarray(change)
    elif name == "prompts" and isinstance(change, tuple):
        change = jnp.ones(change, jnp.int32)
    elif isinstance(change, dict):
        change = make_controls(1, limit=BUFFER, **change)
    with pytest.raises(MarsError, match=sentence):
        ask(way, **{name: change})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda s: decode.speculative_decoder("tiny/target", DRAFTERS["ngram"], RULE),
            "the target is of type str: expected",
        ),
        (
            lambda s: decode.speculative_decoder(TARGET, "ngram", RULE),
            "the drafter is of type str: expected a Drafter",
        ),
        (
            lambda s: DECODER.init({}, Prompts(*arrays(1).values())),
            r"params is of type dict: expected Params\(target",
        ),
        (
            lambda s: DECODER.init(NO_WEIGHTS, arrays(1)),
            r"prompts is of type dict: expected Prompts\(tokens",
        ),
        (lambda s: DECODER.step(s, NO_WEIGHTS), r"params is of type DecodeState: expected Params\(target"),
        (
            lambda s: DECODER.step(NO_WEIGHTS, Prompts(*arrays(1).values())),
            "state is of type Prompts: expected what decode",
        ),
        (
            lambda s: decode.run(DECODER, NO_WEIGHTS, Prompts(*arrays(1).values())),
            "state is of type Prompts: expected what",
        ),
        (lambda s: keys_from_seeds(3), "keys_from_seeds takes one seed for each row"),
    ],
)
def test_what_is_no_model_no_weights_and_no_state_gets_a_sentence(call, sentence):
    with pytest.raises(MarsError, match=sentence):
        call(state())


def test_a_row_is_named_once():
    with pytest.raises(MarsError, match=r"rows are \[1, 1\]: expected each of 0 to 2 at most once"):
        ask("refill", rows=jnp.asarray([1, 1]), **arrays(2))


def test_counters_are_of_the_rows_of_the_state():
    with pytest.raises(MarsError, match="stats are counters of other rows or of another drafter"):
        ask("refill", stats=zero_stats(2, DECODER.max_depth))


EXACT = verify.exact()
OTHERS = {
    "draft": (decode.speculative_decoder(TARGET, drafters.language_model(SMALL, 4), RULE), RULE),
    "rule": (decode.speculative_decoder(TARGET, DRAFTERS["ngram"], EXACT), EXACT),
    "cache": (decode.speculative_decoder(TARGET, DRAFTERS["random tree"], RULE), RULE),
}


@pytest.mark.parametrize(
    ("way", "field"),
    [("refill", "draft"), ("refill", "rule"), ("refill", "cache"), ("extend", "draft"), ("extend", "cache")],
)
def test_a_state_of_another_decoder_is_named(way, field):
    """Its rule does not matter where all rows get one again."""
    decoder, rule = OTHERS[field]
    other = jax.tree.map(
        nothing,
        getattr(
            decode.shapes(decoder, NO_WEIGHTS, Prompts(*(arrays(ROWS, BUFFER) | {"rule": rule}).values())),
            field,
        ),
    )
    with pytest.raises(MarsError, match=f"the field '{field}' of the state is not as this decoder makes it"):
        ask(way, state=lambda state: dataclasses.replace(state, **{field: other}))


def test_shapes_are_checked_where_values_cannot_be_seen():
    """Under jit, without running anything."""
    given = arrays(1)
    one, settings = given["lengths"], {name: given[name] for name in ("controls", "rule", "keys")}

    def told(rows, lengths):
        prompts = Prompts(given["prompts"], lengths, **settings)
        return jax.eval_shape(DECODER.insert, NO_WEIGHTS, state(), rows, prompts)

    assert told(one, one).tokens.shape == (ROWS, BUFFER)
    with pytest.raises(MarsError, match="there are 2 rows for 1 prompts"):
        told(twice(one), one)
    with pytest.raises(MarsError, match="lengths are float32"):
        told(one, one.astype(jnp.float32))


def test_what_is_put_nowhere_changes_nothing():
    """As for `insert`, a row of -1 is none, and not the last."""
    held = decode.start(DECODER, NO_WEIGHTS, Prompts(*arrays(ROWS, BUFFER).values()))
    read, prompts = jax.tree.map(lambda x: x[:1], held), Prompts(*arrays(1).values())
    put = jax.jit(DECODER.insert)(NO_WEIGHTS, held, jnp.asarray([-1]), prompts, read)
    assert committed(put) == committed(held)
    with pytest.raises(MarsError, match=r"rows are \[7\]: expected each of 0 to 2"):
        refill.refill(
            DECODER, NO_WEIGHTS, held, zero_stats(ROWS, DECODER.max_depth), jnp.asarray([7]), prompts, read
        )


STEPPING = {
    "run": lambda *given: decode.run(*given),
    "stream": lambda *given: next(decode.stream(*given)),
    "jitted_step": lambda *given: decode.jitted_step(*given),
    "advance": lambda *given: refill.advance(*given, zero_stats(ROWS, 4)),
    "refill": lambda *given: refill.refill(
        *given, zero_stats(ROWS, 4), jnp.asarray([1]), Prompts(*(arrays(1) | {"rule": EXACT}).values())
    ),
    "Decoder.step": lambda decoder, *given: decoder.step(*given),
    "Decoder.insert": lambda decoder, *given: decoder.insert(
        *given, jnp.asarray([1]), Prompts(*(arrays(1) | {"rule": EXACT}).values())
    ),
}


@pytest.mark.parametrize("way", STEPPING)
def test_a_state_under_a_lossy_rule_is_not_decoded_by_a_lossless_decoder(way):
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], EXACT, prefill_chunk=8)
    with pytest.raises(MarsError, match="the field 'rule' of the state is not as this decoder makes it"):
        STEPPING[way](decoder, NO_WEIGHTS, state())


def test_extend_gives_every_row_the_rule_of_its_new_prompt():
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], EXACT, prefill_chunk=8)
    prompts = Prompts(*(arrays(ROWS) | {"rule": EXACT}).values())
    extended, _ = jax.eval_shape(decoder.extend, NO_WEIGHTS, state(), prompts)
    assert structure(extended.rule) == decoder.rule
