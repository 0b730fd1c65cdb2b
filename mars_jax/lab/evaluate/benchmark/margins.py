"""The margin between the target's two best tokens where drafts are accepted, relaxed and rejected.

B batch, N nodes, D depth. Oracle: tests/lab/evaluate/test_margins.py scores the texts once more, teacher-forced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import decode, struct
from mars_jax.core.evidence import Evidence
from mars_jax.core.rule import Rule, decide, facts
from mars_jax.core.tree import gather_path
from mars_jax.core.types import NO_TOKEN, Verdict
from mars_jax.placement.hosts import fetch
from mars_jax.serve.requests import KINDS as TOKEN_KINDS
from mars_jax.serve.requests import Request
from mars_jax.serve.session import Session

PROBLEMS = 32
"""Problems of a task whose drafts are counted."""
BINS = 50
WIDEST_GAP = 5.0
"""Nats; wider gaps count in the last bin."""
KINDS = ("accepted", "relaxed", "rejected")


class Observed(NamedTuple):
    """Observations of some requests."""

    # By `KINDS`: of every accepted draft token whether it needed the relaxation, and of every step that ended before
    # its draft did, the place where no draft was taken; z1 and z2 there, f32[n] each
    decisions: dict[str, tuple[np.ndarray, np.ndarray]]
    tokens: list[list[int]]  # of each request, in order
    kinds: list[list[str]]  # of these tokens, as in `requests.KINDS`


@struct.dataclass(kw_only=True)
class Seen(Verdict):
    """A verdict with what the target knew at the nodes of its path."""

    z1: Array  # f32[B, D + 1]; raw logits of its two best tokens
    z2: Array
    drafted: Array  # bool[B, D + 1]; something was drafted after the node


@struct.dataclass
class Observe(Rule):
    """A rule that decides as another one does, and tells what it saw."""

    rule: Any

    @property
    def lossless(self) -> bool:
        return facts(self.rule).lossless

    @property
    def needs(self) -> tuple[str, ...]:
        return facts(self.rule).needs

    def __call__(self, evidence: Evidence) -> tuple[Seen, Observe]:
        verdict, rule = decide(self.rule, evidence)
        tree, stats = evidence.tree, evidence.stats
        nodes = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
        child = (tree.parents[:, None, :] == nodes[None, :, None]) & (tree.tokens != NO_TOKEN)[:, None, :]
        seen = Seen(
            **{field.name: getattr(verdict, field.name) for field in dataclasses.fields(Verdict)},
            z1=gather_path(stats.top1, verdict.path),
            z2=gather_path(stats.top2, verdict.path),
            drafted=gather_path(jnp.any(child, axis=2), verdict.path),
        )
        return seen, Observe(rule)


def margin_of(name: str, z1: np.ndarray, z2: np.ndarray) -> np.ndarray:
    """The quantity that a margin's theta bounds, for logits z1 >= z2 of one shape; of a ratio 0 where it says nothing.

    >>> margin_of("ratio", np.asarray([10.0, -1.0]), np.asarray([9.0, -2.0])).tolist()
    [0.9, 0.0]
    """
    if name == "gap":
        return z1 - z2
    return np.where(z1 > 0, np.maximum(z2, 0) / np.where(z1 > 0, z1, 1), 0)


def edges_of(name: str) -> np.ndarray:
    """f64[BINS + 1]: the bins of a margin."""
    return np.linspace(0, WIDEST_GAP if name == "gap" else 1, BINS + 1)


def observe(
    session: Session, requests: Sequence[Request], tick: Callable[[int], None] = lambda count: None
) -> Observed:
    """Decode requests step by step, and keep the target's two best logits wherever something was drafted.

    Args:
      session: the pair, and the rule whose decisions these are.
      requests: from `make_requests`.
      tick: called after every batch, with the number of its requests.
    """
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {kind: [] for kind in KINDS}
    tokens: list[list[int]] = []
    kinds: list[list[str]] = []
    observing = session.using(session.rule._replace(rule=Observe(session.rule.rule)))
    for batch in observing.batches(requests):
        decoder, params, state = batch.session.prepare(batch.requests)
        first = len(tokens)
        tokens += [[] for _ in batch.requests]
        kinds += [[] for _ in batch.requests]
        with session.target.on_mesh():
            for _, info in decode.stream(decoder, params, state):
                emitted, seen, said, kind = fetch((info.num_emitted, info.verdict, info.emitted, info.kind))
                for row in range(len(batch.requests)):
                    tokens[first + row] += said[row, : emitted[row]].tolist()
                    kinds[first + row] += [TOKEN_KINDS[k] for k in kind[row, : emitted[row]]]
                place = np.arange(seen.z1.shape[1])[None]
                written = place < emitted[:, None]
                relaxed = np.pad(seen.relaxed, ((0, 0), (0, 1)))
                accepted = written & (place < seen.num_accepted[:, None])
                rejected = written & (place == seen.num_accepted[:, None]) & seen.drafted
                by_kind = (accepted & ~relaxed, accepted & relaxed, rejected)
                for name, chosen in zip(KINDS, by_kind, strict=True):
                    found[name].append((seen.z1[chosen], seen.z2[chosen]))
        tick(len(batch.requests))
    decisions = {
        kind: (np.concatenate([z1 for z1, _ in parts]), np.concatenate([z2 for _, z2 in parts]))
        for kind, parts in found.items()
    }
    return Observed(decisions, tokens, kinds)


def histograms(margin: str, found: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Counts of decisions by their margin: `edges`, and a list for each of `KINDS`."""
    edges = edges_of(margin)
    counted = {
        kind: np.histogram(np.clip(margin_of(margin, z1, z2), edges[0], edges[-1]), edges)[0].tolist()
        for kind, (z1, z2) in found.items()
    }
    return {"edges": edges.tolist(), **counted}
