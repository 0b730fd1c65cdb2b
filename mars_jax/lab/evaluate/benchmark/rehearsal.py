"""Rehearse a rule at other thresholds, from one decode: tau over theta without a run for each theta.

The decode takes one step for each token and accepts nothing, so that the text is the target's own. In every step the
rule says for each threshold how far it would have walked. A replay then goes along the text by these walks. After a
relaxed token it goes on with the target's own text, where a decode goes on with another one; that is all it does not
know, and for an infinite threshold over `exact` it is a decode. Whatever a rule carries from step to step begins again
at every place.

B batch, K thresholds, N nodes, D depth. Oracle: decodes with the strict rule, in tests/lab/evaluate/test_replay.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import decode, struct
from mars_jax.core.drafter import TRUSTS
from mars_jax.core.evidence import Evidence
from mars_jax.core.rule import Rule, decide
from mars_jax.core.types import Verdict
from mars_jax.drafters import LoadedDrafter
from mars_jax.placement.hosts import fetch
from mars_jax.serve.requests import Request
from mars_jax.serve.session import Session
from mars_jax.specs import RuleChoice, is_own
from mars_jax.verify.exact import named

PROBLEMS = 16
"""Problems of a task whose texts are walked."""
MOST = 9
"""Thresholds of the rule's own grid, of which there may be more."""
RESAMPLES = 2000


@struct.dataclass(kw_only=True)
class Walks(Verdict):
    """A verdict of no token, and how many each threshold would have accepted."""

    accepted: Array  # i32[B, K]


@struct.dataclass
class Rehearse(Rule):
    """A rule that accepts nothing, emits what the target would say, and tells what another one would have accepted."""

    rule: Any
    thetas: tuple[float, ...] = struct.field(pytree_node=False)
    needs = ("draft_hidden",)  # what the other one may read

    def __call__(self, evidence: Evidence) -> tuple[Walks, Rehearse]:
        batch, depth = evidence.tree.tokens.shape[0], evidence.tree.max_depth

        def accepted(theta: Array) -> Array:
            rule = dataclasses.replace(self.rule, theta=jnp.broadcast_to(theta, (batch,)))
            return decide(rule, evidence)[0].num_accepted

        walks = Walks(
            path=jnp.zeros((batch, depth + 1), jnp.int32),
            num_accepted=jnp.zeros((batch,), jnp.int32),
            next_token=named(evidence)[:, 0],
            relaxed=jnp.zeros((batch, depth), bool),
            # One after the other, so that the rule is compiled once and not for each.
            accepted=jax.lax.map(accepted, jnp.asarray(self.thetas, jnp.float32)).T,
        )
        return walks, self


def thetas_of(choice: RuleChoice, loaded: LoadedDrafter, measured: Sequence[float]) -> list[float]:
    """The thresholds to replay, from strict to loose and inf first; none where a rule has none, or where a draft is not
    judged place by place: one that trusts itself, or follows what was accepted before.

    >>> from mars_jax import drafters
    >>> thetas_of(RuleChoice("mars", {}), drafters.loaded(drafters.ngram(4), None), [0.9])
    [inf, 0.98, 0.94, 0.9, 0.86, 0.82, 0.75, 0.65, 0.55]
    """
    follows = TRUSTS in loaded.drafter.traits or loaded.sizes is not None
    if is_own(choice.spec) or "theta" not in choice.options or follows:
        return []
    setting, structure = choice.setting("theta")
    grid = setting.range(**structure).grid
    every = math.ceil(len(grid) / (MOST - 1))
    chosen = {*grid[::every], *measured}
    down = len(grid) > 1 and grid[0] > grid[-1]  # a looser threshold is a lower one
    return [math.inf, *sorted(chosen, reverse=down)]


def walks(
    session: Session, requests: Sequence[Request], thetas: Sequence[float], tick: Callable[[int], None]
) -> list[list[tuple[int, int]]]:
    """Steps and tokens of every request at each threshold, [n][K].

    Args:
      session: the pair, and the rule, whose `theta` is replaced.
      requests: from `make_requests`.
      thetas: K of them.
      tick: called after every batch, with the number of its requests.
    """
    rehearsed = session.rule._replace(rule=Rehearse(session.rule.rule, tuple(thetas)))
    counted = []
    for batch in session.using(rehearsed).batches(requests):
        decoder, params, state = batch.session.prepare(batch.requests)
        with session.target.on_mesh():
            steps = [
                fetch((info.num_emitted, info.verdict.accepted))  # pyright: ignore[reportAttributeAccessIssue]
                for _, info in decode.stream(decoder, params, state)
            ]
        live = np.stack([emitted for emitted, _ in steps], axis=1) > 0  # bool[B, steps]
        accepted = np.stack([walked for _, walked in steps], axis=1)  # i32[B, steps, K]
        for row in range(len(batch.requests)):
            counted.append(counts(accepted[row, live[row]]))
        tick(len(batch.requests))
    return counted


def counts(accepted: np.ndarray) -> list[tuple[int, int]]:
    """(steps, tokens) of one text at each threshold, from how many tokens would be accepted at each place, i[T, K].

    >>> counts(np.asarray([[0, 2], [1, 0], [0, 0]]))
    [(2, 3), (1, 3)]
    """
    places, found = len(accepted), []
    for walked in accepted.T:
        place = steps = 0
        while place < places:
            steps += 1
            place += int(walked[place]) + 1
        found.append((steps, places))
    return found


def as_json(thetas: Sequence[float], counted: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
    """For replay.json; infinities as texts."""
    return {
        "thetas": [str(theta) if math.isinf(theta) else theta for theta in thetas],
        "steps": [[steps for steps, _ in text] for text in counted],
        "tokens": [text[0][1] for text in counted],
    }


def taus(replayed: Mapping[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """`problems`, and lists over the thresholds: `thetas`, `tau`, and `interval`, 95% by the bootstrap over problems.

    >>> taus({"thetas": ["inf", 0.9], "steps": [[4, 2], [4, 2]], "tokens": [8, 8]})["tau"]
    [2.0, 4.0]
    """
    steps, tokens = np.asarray(replayed["steps"], np.float64), np.asarray(replayed["tokens"], np.float64)
    count = len(tokens)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    resampled = (draws @ tokens)[:, None] / (draws @ steps)
    low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
    return {
        "problems": count,
        "thetas": list(replayed["thetas"]),
        "tau": (tokens.sum() / steps.sum(axis=0)).tolist(),
        "interval": np.stack([low, high], axis=1).tolist() if count > 1 else [None] * steps.shape[1],
    }
