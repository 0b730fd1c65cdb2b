"""Bans and constraints hold under every rule, even a rule that accepts anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import constraints, contrib, drafters, verify
from mars_jax.constraints.batch_tables import compiled
from mars_jax.core import decode, struct
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import make_edits
from mars_jax.core.rule import Rule, evidence
from mars_jax.core.step import cut
from mars_jax.core.tree import walk
from mars_jax.core.types import GuideRows, GuideTables, Params, Verdict
from tests.helpers import begin, committed, ragged, slow_but
from tests.helpers.constrained import DRAFT, STOP, TARGET, VOCAB, VOCABULARY, text_of
from tests.helpers.random_trees import B, D, N, V, random_tree

BANNED = (3, 5, 9)
PATTERN = constraints.regex(r"[ab]+-[ab1]{1,9}")


@struct.dataclass
class Anything:
    """A user's rule that accepts every draft and emits the target's least likely token."""

    def __call__(self, evidence):
        path, accepted, relaxed = walk(evidence.tree, evidence.tree.tokens >= 0, None)
        least = jnp.argmin(evidence.logits, axis=-1).astype(jnp.int32)
        least = jnp.take_along_axis(least, path[:, -1:], axis=1)[:, 0]
        return Verdict(path=path, num_accepted=accepted, next_token=least, relaxed=relaxed), self


@struct.dataclass
class AnyEdge(verify.Relaxed):
    """A user's rule over edges that relaxes all of them."""

    def relaxable(self, evidence):
        return jnp.ones_like(evidence.tree.tokens, bool)


RULES = {
    "simulated": contrib.simulated(5),
    "fly": contrib.fly(entropy=0.0, window=1),
    "mixture": verify.mixture(weight=0.2),
    "anything": Anything(),
    "any edge": AnyEdge(),
}


@struct.dataclass
class OneEach(Rule):
    """Rows 2 i and 2 i + 1 are verified by the i-th rule, with all rules in one program."""

    rules: tuple

    def __call__(self, evidence):
        verdicts = [rule(evidence)[0] for rule in self.rules]

        def select_rows(*all_rows):
            return jnp.stack([all_rows[row // 2][row] for row in range(2 * len(all_rows))])

        return jax.tree.map(select_rows, *verdicts), self


class Unconstrained(drafters.language_model):
    """A user's drafter that ignores constraints."""

    def propose(self, params, state, inputs):
        return super().propose(params, state, inputs.replace(guide=None))


@pytest.mark.slow
def test_no_rule_emits_a_banned_token_or_breaks_a_constraint():
    rows, rule = 2 * len(RULES), OneEach(tuple(RULES.values()))
    row_constraints = [None, PATTERN] * len(RULES)
    tables = compiled(row_constraints, VOCABULARY)
    tokens, lengths = ragged([1, 6, 12, 4, 3] * 2, 40, VOCAB)
    controls = make_controls(rows, limit=40, stop_tokens=[STOP], temperature=1.0).replace(
        edits=make_edits(rows, logit_bias=[dict.fromkeys(BANNED, -np.inf), {}] * len(RULES)),
        guides=GuideRows(constraint=tables.rows(row_constraints)),
    )
    drafter = Unconstrained(DRAFT, 5, sample=True)
    params = Params(target=(), draft=(), guides=GuideTables(constraint=tables.tables))
    decoder, state = begin(TARGET, drafter, rule, tokens, lengths, controls=controls, params=params)
    state, stats = decode.run(decoder, params, state)
    for row, (tokens, start) in enumerate(zip(committed(state), lengths.tolist(), strict=True)):
        new, name = tokens[start:], [*RULES][row // 2]
        if row % 2 == 0:
            assert new and not set(new) & set(BANNED), name
        elif new[-1] == STOP:
            assert PATTERN.automaton.matches(text_of(new[:-1])), name
        else:
            assert PATTERN.automaton.begins(text_of(new).encode()), name
    accepted = np.asarray(stats.accepted_exact + stats.accepted_relaxed)
    assert np.all(accepted.reshape(-1, 2).sum(1) > 0), accepted


def random_evidence(seed, temperature):
    """Return evidence on random trees, with about 40% of the logits -inf."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(B, N, V)).astype(np.float32) * 2
    logits[..., 1:][rng.random((B, N, V - 1)) < 0.4] = -np.inf
    draft_logits = jnp.asarray(rng.normal(size=(B, N, V)), jnp.float32) if temperature else None
    tree = random_tree(rng).replace(draft_logits=draft_logits)
    return evidence(tree, jnp.asarray(logits), seeds=np.arange(B) + seed, temperature=temperature)


@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 1.0))
def test_a_cut_is_that_of_a_python_loop_and_leaves_lossless_rules_unchanged(temperature):
    rules = [verify.exact()] if not temperature else [verify.exact(), verify.rejection()]

    @jax.jit
    def verdicts(inputs):
        lossy = Anything()(inputs)[0]
        return lossy, cut(lossy, inputs), [(v, cut(v, inputs)) for v in (rule(inputs)[0] for rule in rules)]

    for seed in range(6):
        inputs = random_evidence(10 * seed, temperature)
        lossy, legal, pairs = jax.device_get(verdicts(inputs))
        for lossless, same in pairs:
            jax.tree.map(np.testing.assert_array_equal, lossless, same)
        tree, logits = jax.device_get((inputs.tree, inputs.logits))
        for b in range(B):
            count = 0
            for node in lossy.path[b, 1 : 1 + lossy.num_accepted[b]]:
                if logits[b, tree.parents[b, node], tree.tokens[b, node]] == -np.inf:
                    break
                count += 1
            last = lossy.path[b, count]
            assert legal.num_accepted[b] == count
            assert legal.path[b].tolist() == [*lossy.path[b, :count], *[last] * (D + 1 - count)]
            assert np.isfinite(logits[b, last, legal.next_token[b]])
            if last == lossy.path[b, -1] and np.isfinite(logits[b, last, lossy.next_token[b]]):
                assert legal.next_token[b] == lossy.next_token[b]
            elif not temperature:
                assert legal.next_token[b] == np.argmax(logits[b, last])
