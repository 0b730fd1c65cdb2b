"""Bad arguments are rejected before anything runs, with one sentence that names the argument."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, refill
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import Drafter
from mars_jax.core.metrics import zero_stats
from mars_jax.core.rule import structure
from mars_jax.core.types import Prompts, keys_from_seeds
from mars_jax.utils.errors import MarsError
from tests.helpers import NO_WEIGHTS
from tests.helpers.fake_drafters import DRAFTERS, SMALL, TARGET, VOCAB

ROWS, BUFFER, WIDTH = 3, 12, 8
RULE = verify.mars(theta=0.5)
DECODER = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], RULE, prefill_chunk=8)


def arrays(count, width=WIDTH, rule=RULE):
    return {
        "prompts": jnp.full((count, width), 5, jnp.int32),
        "lengths": jnp.full((count,), 4, jnp.int32),
        "controls": make_controls(count, limit=BUFFER),
        "rule": rule,
        "keys": keys_from_seeds(jnp.arange(count, dtype=jnp.uint32)),
    }


def prompts_of(count, width=WIDTH, rule=RULE):
    return Prompts(*arrays(count, width, rule).values())


def zeros(x):
    """Return zeros of the shape and dtype of `x`, or keys if it holds keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return keys_from_seeds(jnp.arange(ROWS))
    return jnp.zeros(x.shape, x.dtype)


@functools.cache
def state():
    """Return a state of the right shapes. The calls below fail before they read its values."""
    return jax.tree.map(zeros, decode.shapes(DECODER, NO_WEIGHTS, prompts_of(ROWS, BUFFER)))


def call(entry, **changes):
    """Call `insert`, `refill` or `extend` with some arguments replaced, or changed by a function."""
    arguments = {"state": state(), "stats": zero_stats(ROWS, DECODER.max_depth), "rows": jnp.asarray([1])}
    arguments |= arrays(ROWS if entry == "extend" else 1)
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) and name != "rule" else change
    old, stats, rows, *new = arguments.values()
    if entry == "extend":
        return decode.extend(DECODER, NO_WEIGHTS, old, Prompts(*new))
    if entry == "insert":
        return DECODER.insert(NO_WEIGHTS, old, rows, Prompts(*new))
    return refill.refill(DECODER, NO_WEIGHTS, old, stats, rows, Prompts(*new))


def twice(tree):
    return jax.tree.map(lambda x: jnp.concatenate([x, x]), tree)


BAD_ARGUMENTS = [
    ("lengths", lambda x: x.at[0].set(0), "a prompt has the length 0: expected 1 to 8"),
    ("lengths", lambda x: x.at[0].set(9), "a prompt has the length 9: expected 1 to 8"),
    ("lengths", lambda x: x.astype(jnp.float32), "lengths are float32.*: expected an array of whole numbers"),
    ("lengths", twice, "there are . lengths for . prompts: give one for each"),
    ("prompts", lambda x: x > 0, "prompts are bool.*: expected an array of whole numbers"),
    ("prompts", lambda x: x.at[0, 3].set(VOCAB), "a prompt has the token 13: expected ids of 0 to 12"),
    ("prompts", lambda x: x.at[0, 0].set(-1), "a prompt has the token -1: expected ids of 0 to 12"),
    ("controls", twice, "temperature of the controls has shape .* for . prompts: make the controls with make_controls"),
    ("controls", lambda x: {"limit": 8}, "controls is of type dict: expected the result of make_controls"),
    ("keys", twice, "keys have shape .* for . prompts: give keys_from_seeds a seed for each"),
    ("keys", lambda x: jnp.zeros((x.shape[0], 2), jnp.uint32), "keys are of dtype uint32: expected typed keys"),
    (
        "keys", lambda x: jax.random.split(jax.random.key(0, impl="rbg"), x.shape[0]),
        "expected typed keys of threefry2x32",
    ),
    ("rule", verify.exact(), "the rule exact is not of the structure"),
    ("rule", verify.mars(theta=[0.5] * 5), "theta of the rule has shape .5,.: expected one number, or one for each"),
    ("state", lambda x: x.cache, "state is of type KVCache: expected the result of decode.start or Decoder.init"),
]  # fmt: skip
BAD_ROWS = [
    ("rows", jnp.asarray([3]), "rows are .3.: expected each of 0 to 2 at most once, or -1 for none"),
    ("rows", jnp.asarray([-2]), "rows are .-2.: expected each of 0 to 2 at most once"),
    ("rows", jnp.asarray([True]), r"rows are bool\[1\]: expected an array of whole numbers"),
    ("rows", jnp.asarray([0, 1]), "there are 2 rows for 1 prompts: name one for each"),
    (
        "controls", make_controls(1, limit=BUFFER, stop_tokens=[[1, 2, 3]]),
        "a row has 3 stop tokens and the state has room for 1",
    ),
    ("prompts", jnp.ones((1, BUFFER + 1), jnp.int32), "the prompts are 13 wide and the state's token buffer 12: cut"),
    (
        "controls", make_controls(1, limit=BUFFER, temperature=None),
        "the rows have a temperature and the state has none, or the other way round",
    ),
]  # fmt: skip
CASES = [(entry, *case) for entry in ("insert", "refill", "extend") for case in BAD_ARGUMENTS]
CASES += [(entry, *case) for entry in ("insert", "refill") for case in BAD_ROWS]
CASES += [
    (
        "extend",
        "prompts",
        jnp.ones((3, 13), jnp.int32),
        r"prompts are \[3, 13\] and the state has 3 rows of 12 tokens",
    )
]


@pytest.mark.parametrize(
    ("entry", "name", "change", "sentence"), CASES, ids=[f"{entry} with {name}" for entry, name, *_ in CASES]
)
def test_a_bad_argument_gets_one_sentence(entry, name, change, sentence):
    with pytest.raises(MarsError, match=sentence):
        call(entry, **{name: change})


@dataclasses.dataclass
class Unhashable(Drafter):
    max_depth: int = 1


def test_a_row_named_twice_and_counters_of_other_rows_get_one_sentence():
    with pytest.raises(MarsError, match=r"rows are \[1, 1\]: expected each of 0 to 2 at most once"):
        call("refill", rows=jnp.asarray([1, 1]), **arrays(2))
    with pytest.raises(MarsError, match="stats are counters of other rows or of another drafter"):
        call("refill", stats=zero_stats(2, DECODER.max_depth))


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (decode.speculative_decoder, lambda: ("tiny/target", DRAFTERS["ngram"], RULE), "the target is of type str"),
        (decode.speculative_decoder, lambda: (TARGET, "ngram", RULE), "the drafter is of type str: expected a Drafter"),
        (
            decode.speculative_decoder,
            lambda: (TARGET, Unhashable(), RULE),
            r"the drafter 'unhashable\(1\)' cannot be hashed .*: make it a dataclass with frozen=True",
        ),
        (DECODER.init, lambda: ({}, prompts_of(1)), r"params is of type dict: expected Params\(target"),
        (DECODER.init, lambda: (NO_WEIGHTS, arrays(1)), r"prompts is of type dict: expected Prompts\(tokens"),
        (DECODER.step, lambda: (state(), NO_WEIGHTS), r"params is of type DecodeState: expected Params\(target"),
        (DECODER.step, lambda: (NO_WEIGHTS, prompts_of(1)), "state is of type Prompts: expected the result of decode"),
        (decode.run, lambda: (DECODER, NO_WEIGHTS, prompts_of(1)), "state is of type Prompts: expected the result"),
        (keys_from_seeds, lambda: (3,), "keys_from_seeds takes one seed for each row"),
    ],
)  # fmt: skip
def test_an_argument_of_another_type_gets_one_sentence(function, arguments, sentence):
    with pytest.raises(MarsError, match=sentence):
        function(*arguments())


EXACT = verify.exact()
OTHER_DECODERS = {
    "draft": (drafters.language_model(SMALL, 4), RULE),
    "rule": (DRAFTERS["ngram"], EXACT),
    "cache": (DRAFTERS["random tree"], RULE),
}


@pytest.mark.parametrize(
    ("entry", "field"),
    # `extend` gives every row a new rule, so the rule of the state does not matter.
    [("refill", "draft"), ("refill", "rule"), ("refill", "cache"), ("extend", "draft"), ("extend", "cache")],
)
def test_a_state_of_another_decoder_is_refused(entry, field):
    drafter, rule = OTHER_DECODERS[field]
    decoder = decode.speculative_decoder(TARGET, drafter, rule)
    shapes = decode.shapes(decoder, NO_WEIGHTS, prompts_of(ROWS, BUFFER, rule))
    foreign = jax.tree.map(zeros, getattr(shapes, field))
    with pytest.raises(MarsError, match=f"the field '{field}' of the state does not match this decoder"):
        call(entry, state=lambda state: dataclasses.replace(state, **{field: foreign}))


def test_under_jit_shapes_are_checked_without_values():
    arguments = arrays(1)
    single, settings = arguments["lengths"], {name: arguments[name] for name in ("controls", "rule", "keys")}

    def insert(rows, lengths):
        prompts = Prompts(arguments["prompts"], lengths, **settings)
        return jax.eval_shape(DECODER.insert, NO_WEIGHTS, state(), rows, prompts)

    assert insert(single, single).tokens.shape == (ROWS, BUFFER)
    with pytest.raises(MarsError, match="there are 2 rows for 1 prompts"):
        insert(twice(single), single)
    with pytest.raises(MarsError, match="lengths are float32"):
        insert(single, single.astype(jnp.float32))


STEPPING = {
    "run": decode.run,
    "stream": lambda *args: next(decode.stream(*args)),
    "jitted_step": decode.jitted_step,
    "advance": lambda *args: refill.advance(*args, zero_stats(ROWS, 4)),
    "refill": lambda *args: refill.refill(
        *args, zero_stats(ROWS, 4), jnp.asarray([1]), prompts_of(1, rule=EXACT)
    ),
    "Decoder.step": lambda decoder, *args: decoder.step(*args),
    "Decoder.insert": lambda decoder, *args: decoder.insert(
        *args, jnp.asarray([1]), prompts_of(1, rule=EXACT)
    ),
}


@pytest.mark.parametrize("function", STEPPING)
def test_a_lossless_decoder_refuses_a_state_under_a_lossy_rule(function):
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], EXACT, prefill_chunk=8)
    with pytest.raises(MarsError, match="the field 'rule' of the state does not match this decoder"):
        STEPPING[function](decoder, NO_WEIGHTS, state())


def test_extend_gives_every_row_the_rule_of_its_new_prompt():
    decoder = decode.speculative_decoder(TARGET, DRAFTERS["ngram"], EXACT, prefill_chunk=8)
    extended, _ = jax.eval_shape(decoder.extend, NO_WEIGHTS, state(), prompts_of(ROWS, rule=EXACT))
    assert structure(extended.rule) == decoder.rule_structure
