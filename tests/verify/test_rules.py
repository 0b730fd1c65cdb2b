"""Tests that every rule of the table must pass. A new rule is one row of `CASES`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.contrib.models import indicator, mixer
from mars_jax.core import decode
from mars_jax.core import tree as trees
from mars_jax.core.rule import LoadedRule, decide, for_rows, structure, take_rows
from mars_jax.core.types import Params
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, decode_all, ragged, slow_but
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB

BATCH, BUFFER = 4, 40
CHAIN = drafters.language_model(SMALL, 4)
SAMPLED = drafters.language_model(SMALL, 4, sample=True)
TREE = drafters.language_model(SMALL, tree=(2, 2, 1))
SAMPLED_TREE = drafters.language_model(SMALL, tree=drafters.Dynamic(2, 3, 7), sample=True)
SETTINGS = {"temperature": [0.0, 0.9, 1.3, 0.0], "top_k": [0, 5, 0, 0]}


class Case(NamedTuple):
    rule: Any  # at settings that relax
    base: Any  # the rule that it equals if strict
    # Numbers at which the rule equals its base; None if only `strict` does that.
    strict: dict[str, Any] | None = None
    changed: dict[str, Any] | None = None  # other numbers
    params: Any = tuple  # a function, so that no test file computes when it is imported
    drafter: Any = CHAIN
    relaxes: bool = True


@functools.cache
def learned_head():
    params = indicator.init_params(1, jax.random.key(0), width=2)
    return params | {"margin": jnp.asarray([1.0, 0.0]), "bias": jnp.asarray(-2.0)}


@functools.cache
def mixer_head():
    params = mixer.init_params(1, jax.random.key(0), width=2, draft_hidden_size=1)
    return params | {"outer": jnp.asarray([0.5, -0.5]), "signals": jnp.asarray([0.3, -0.2, 1.0])}


CASES = {
    "exact": Case(verify.exact(), verify.exact(), relaxes=False),
    "rejection": Case(verify.rejection(), verify.rejection(), drafter=SAMPLED, relaxes=False),
    "block": Case(verify.rejection(block=True), verify.rejection(block=True), drafter=SAMPLED, relaxes=False),
    "mars": Case(verify.mars(theta=0.5), verify.exact(), {"theta": np.inf}, {"theta": 0.8}, drafter=TREE),
    "mars over rejection": Case(
        verify.mars(base=verify.rejection(), theta=0.5), verify.rejection(), {"theta": np.inf}, {"theta": 0.97},
        drafter=SAMPLED,
    ),
    "rejection on trees": Case(verify.rejection(), verify.rejection(), drafter=SAMPLED_TREE, relaxes=False),
    "mars over rejection on trees": Case(
        verify.mars(base=verify.rejection(), theta=0.5), verify.rejection(), {"theta": np.inf}, {"theta": 0.97},
        drafter=SAMPLED_TREE,
    ),
    "mixture on trees": Case(
        verify.mixture(weight=0.2), verify.rejection(), {"weight": 1.0}, {"weight": 0.7}, drafter=SAMPLED_TREE
    ),
    "mars by position": Case(
        contrib.by_context("position", theta=0.5), verify.exact(), {"theta": np.inf}, {"theta": 0.8},
        params=lambda: contrib.context("position", (1.5, 0.5), edges=(1,)),
    ),
    "gap": Case(verify.mars(margin="gap", theta=1.5), verify.exact(), {"theta": np.inf}, {"theta": 0.5}),
    "learned": Case(
        contrib.learned(theta=0.5), verify.exact(), {"theta": np.inf}, {"theta": 0.13}, params=learned_head,
        drafter=TREE,
    ),
    "simulated": Case(contrib.simulated(3), verify.exact(), None, {"tau": 1.5}),
    "topk": Case(verify.topk(delta=1.5), verify.exact(), {"k": 0}, {"delta": 0.4}, drafter=TREE),
    "typical": Case(
        verify.typical(), verify.exact(), {"epsilon": 1.0, "delta": np.inf}, {"delta": 3.0}, drafter=TREE
    ),
    "nucleus": Case(verify.nucleus(), verify.rejection(), {"mass": 0.0}, {"mass": 0.4}, drafter=SAMPLED),
    "adaptive": Case(verify.adaptive(), verify.exact(), {"theta": np.inf}, {"theta": 0.7}, drafter=TREE),
    "entropy_gate": Case(
        contrib.entropy_gate(entropy=0.5), verify.exact(), {"entropy": np.inf}, {"entropy": 2.3}, drafter=TREE
    ),
    "fly": Case(contrib.fly(window=1), verify.exact(), {"entropy": np.inf}, {"window": 2}),
    "phrase": Case(contrib.phrase(bound=2.0, window=1), verify.exact(), {"bound": 0.0}, {"window": 2}, drafter=TREE),
    "equivalent": Case(
        contrib.equivalent(gap=np.inf), verify.exact(), {"gap": 0.0}, {"gap": 0.1}, drafter=TREE,
        params=lambda: jnp.asarray([0, 1, 1, 2, 2, 2, 3, 3, 0, 4, 4, 4, 4], jnp.int32),
    ),
    "budget": Case(contrib.budget(gap=1.0), verify.exact(), {"max_relaxed": 0}, {"total": 1.0}, drafter=TREE),
    "lenience": Case(
        contrib.lenience(factor=0.2), verify.rejection(), {"factor": 1.0}, {"factor": 1.0}, drafter=SAMPLED
    ),
    "mixture": Case(
        verify.mixture(weight=0.2), verify.rejection(), {"weight": 1.0}, {"weight": 0.7}, drafter=SAMPLED
    ),
    "diversed": Case(
        contrib.diversed(shift=-2.0), verify.rejection(), {"shift": np.inf}, {"shift": 0.0}, drafter=SAMPLED,
        params=mixer_head,
    ),
    "cactus": Case(
        contrib.cactus(divergence=2), verify.rejection(), {"divergence": 0.0}, {"divergence": 0.0}, drafter=SAMPLED
    ),
    "speccascade": Case(
        contrib.speccascade(alpha=0.9), verify.rejection(), None, {"alpha": 0.1}, drafter=SAMPLED
    ),
    "mentored": Case(
        contrib.mentored(bound=0.5), verify.rejection(), {"bound": 0.0}, {"bound": 0.05}, drafter=SAMPLED
    ),
    "fuzzy": Case(
        contrib.fuzzy(bound=0.4), verify.rejection(), {"bound": 0.0}, {"bound": 0.1}, drafter=SAMPLED
    ),
    "released": Case(contrib.released(ratio=0.4), verify.rejection(), None, {"ratio": np.inf}, drafter=SAMPLED),
}  # fmt: skip
LIKE_ANOTHER = {
    "mars by position", "gap", "simulated", "topk", "typical", "adaptive", "entropy_gate", "nucleus",
    "lenience", "cactus", "diversed", "speccascade", "mars over rejection on trees", "mixture on trees", "phrase",
    "fly", "mentored", "fuzzy", "equivalent", "released", "block", "mars over rejection", "rejection on trees",
}  # fmt: skip
"""Stateless rules that differ from another rule only in a formula, weights or their base. Their tests are slow."""


def rules_that(holds=lambda case: True, fast=set(CASES) - LIKE_ANOTHER):
    """Parametrize a test over rules. Module scope runs the tests of a rule in sequence, as they share programs."""
    names = [name for name, case in CASES.items() if holds(case)]
    return pytest.mark.parametrize("name", slow_but(names, *fast), scope="module")


every_rule = rules_that()
relaxing = rules_that(lambda case: case.relaxes)
with_other_numbers = rules_that(lambda case: case.changed is not None)
only_with_state = rules_that(fast=("budget",))  # for tests that compile another program


def with_numbers(rule, numbers):
    dtypes = {name: np.asarray(getattr(rule, name)).dtype for name in numbers}
    return dataclasses.replace(rule, **{k: np.asarray(v, dtypes[k]) for k, v in numbers.items()})


@functools.cache
def prompts():
    return ragged([1, 6, 12, 17], BUFFER, VOCAB)


def decoded(case, rule, **settings):
    """Return the tokens of each row. The base gets no weights, so that all rules share its program."""
    params = Params((), (), () if rule is case.base else case.params())
    state, _ = decode_all(TARGET, case.drafter, rule, *prompts(), params=params, **{**SETTINGS, **settings})
    return committed(state)


def compiled():
    """Return the number of compiled programs."""
    return decode.run._cache_size(), decode.start_ready._cache_size()


@relaxing
def test_at_its_strict_setting_a_rule_is_its_base_bit_for_bit(name):
    case = CASES[name]
    base_rows, relaxed_rows = decoded(case, case.base), decoded(case, case.rule)
    assert relaxed_rows != base_rows, "the setting relaxes nothing"
    for strict in ([True] * BATCH, [True, False, True, False]):
        expected = [base_rows[row] if strict[row] else relaxed_rows[row] for row in range(BATCH)]
        assert decoded(case, case.rule, strict=strict) == expected
    if case.strict is not None:
        assert decoded(case, with_numbers(case.rule, case.strict)) == base_rows


@every_rule
def test_a_row_next_to_finished_ones_equals_the_row_in_a_batch(name):
    case = CASES[name]
    together = decoded(case, case.rule)
    for row in (1, 3):
        single = decoded(case, case.rule, limit=[BUFFER if i == row else 1 for i in range(BATCH)])
        assert single[row] == together[row]
        assert [len(text) for text in single] != [len(text) for text in together]


@with_other_numbers
def test_changed_numbers_compile_nothing_and_apply_per_row(name):
    case = CASES[name]
    unchanged = decoded(case, case.rule)
    count = compiled()
    changed = decoded(case, with_numbers(case.rule, case.changed))
    assert changed != unchanged
    per_row = {k: [v, float(getattr(case.rule, k))] * 2 for k, v in case.changed.items()}
    mixed = decoded(case, with_numbers(case.rule, per_row))
    assert mixed == [changed[0], unchanged[1], changed[2], unchanged[3]]
    assert compiled() == count


@relaxing
def test_the_exact_prefix_of_each_row_follows_its_base(name):
    case = CASES[name]
    base_rows, relaxed_rows = decoded(case, case.base), decoded(case, case.rule)
    count = compiled()
    prefixes, ends = prefixes_of(relaxed_rows, base_rows)
    prefixed_rows = decoded(case, with_numbers(case.rule, {"exact_prefix": prefixes}))
    for row, base_row, end in zip(prefixed_rows, base_rows, ends, strict=True):
        assert row[:end] == base_row[:end]
    # Set the prefix of only one row.
    single_rule, single_row = prefix_of_one(case.rule, prefixes)
    relaxed_rows[single_row] = prefixed_rows[single_row]
    assert decoded(case, single_rule) == relaxed_rows
    assert decoded(case, with_numbers(case.rule, {"exact_prefix": 2**31 - 1})) == base_rows
    assert compiled() == count


def prefixes_of(relaxed_rows, base_rows):
    """Return prefixes that end two tokens after the first relaxed one, 0 if there is none, and their ends."""
    differ = [
        next((i for i, (x, y) in enumerate(zip(*pair, strict=False)) if x != y), 0)
        for pair in zip(relaxed_rows, base_rows, strict=True)
    ]
    ends = [first + 3 if first else 0 for first in differ]
    return [max(end - length, 0) for end, length in zip(ends, prompts()[1].tolist(), strict=True)], ends


def prefix_of_one(rule, prefixes):
    """Return the rule with the prefix of only the first row that has one, and that row."""
    first = next(row for row, prefix in enumerate(prefixes) if prefix)
    return with_numbers(rule, {"exact_prefix": [p * (row == first) for row, p in enumerate(prefixes)]}), first


@flax.struct.dataclass
class Wrapped(verify.Rule):
    """A user's wrapper of any rule, so it needs the hidden states of the draft."""

    inner: Any
    calls: Any
    needs = ("draft_hidden",)

    def __call__(self, evidence):
        verdict, inner = self.inner(evidence)
        return verdict, dataclasses.replace(self, inner=inner, calls=self.calls + 1)


@only_with_state
def test_under_a_wrapper_it_is_the_same_and_the_wrapper_keeps_state(name):
    case, rule = CASES[name], CASES[name].rule
    if case.relaxes:
        rule, _ = prefix_of_one(rule, prefixes_of(decoded(case, rule), decoded(case, case.base))[0])
    wrapped, params = Wrapped(rule, np.int32(0)), Params((), (), case.params())
    state, stats = decode_all(TARGET, case.drafter, wrapped, *prompts(), params=params, **SETTINGS)
    assert committed(state) == decoded(case, rule)
    # Steps of finished rows do not count.
    np.testing.assert_array_equal(state.rule.calls, stats.steps)


@every_rule
def test_a_text_ends_at_its_first_stop_token(name):
    """A relaxed rule neither inserts a stop token nor skips one."""
    stops, lengths = [3, 7], prompts()[1].tolist()
    rows = decoded(CASES[name], CASES[name].rule, stop_tokens=stops)
    for text, n in zip(rows, lengths, strict=True):
        assert not set(text[n:-1]) & set(stops)
        assert len(text) == BUFFER or text[-1] in stops
    assert any(text[-1] in stops and len(text) < BUFFER for text in rows)


@pytest.mark.slow
@every_rule
def test_in_a_mesh_the_text_is_that_of_one_device(name):
    case = CASES[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        sharded_rows = decoded(case, case.rule)
    assert sharded_rows == decoded(case, case.rule)


decided = jax.jit(decide)


@pytest.mark.parametrize("generated", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "rule", [verify.mars(theta=0.5), pytest.param(verify.adaptive(theta=0.5), marks=pytest.mark.slow)]
)
def test_an_exact_prefix_ends_at_its_token(rule, generated):
    """Every drafted token is the runner-up. Generated tokens count towards the exact prefix of two."""
    tree = trees.chain(jnp.asarray([[0, 2, 2, 2, 2]], jnp.int32))
    evidence = verify.evidence(
        tree,
        jnp.asarray([[[0.0, 10.0, 9.9]] * 5]),
        start=jnp.asarray([6 + generated], jnp.int32),
        prompt_length=jnp.asarray([7], jnp.int32),
    )
    rule = for_rows(dataclasses.replace(rule, exact_prefix=np.int32(2)), 1)
    verdict, _ = decided(rule, evidence)
    assert int(verdict.num_accepted[0]) == (0 if generated < 2 else 4)
    exact_first = evidence.replace(tree=trees.chain(jnp.asarray([[0, 1, 2, 2, 2]], jnp.int32)))
    verdict, _ = decided(rule, exact_first)
    assert int(verdict.num_accepted[0]) == (1 if generated < 1 else 4)


def test_the_table_and_the_tests_name_the_same_rules():
    tested = {case.rule.name.split()[0].split("(")[0] for case in CASES.values()} | set(CASES)
    assert {"block" if name == "rejection" else name for name in verify.rules()} <= tested


def test_a_rule_is_recognized_by_its_structure():
    assert structure(verify.mars(theta=0.5)) == structure(verify.mars(theta=[0.5, 0.9]))
    assert structure(verify.mars()) != structure(verify.mars(margin="gap", theta=1.0))
    for wrong in (None, "mars", lambda evidence: None, 3, object()):
        with pytest.raises(MarsError, match="expected a rule"):
            structure(wrong)
    with pytest.raises(MarsError, match=r"give its \.rule"):
        structure(LoadedRule(verify.mars()))


def test_a_number_of_a_rule_is_one_for_all_rows_or_one_per_row():
    spread = for_rows(verify.mars(theta=0.5, max_relaxed_run=[1, 2, 3]), 3)
    assert spread.theta.tolist() == [0.5] * 3 and spread.max_relaxed_run.dtype == jnp.int32
    with pytest.raises(MarsError, match=r"theta of the rule has shape \(2,\).*each of the 3 rows"):
        for_rows(verify.mars(theta=[0.5, 0.6]), 3)
    with pytest.raises(MarsError, match="theta of the rule has 2 values for 3 prompts"):
        take_rows(verify.mars(theta=[0.5, 0.6]), [0], 3)
