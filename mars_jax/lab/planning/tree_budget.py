"""How many nodes a tree of a block's marginals should have: what they win, on prompts, and what they cost.

Source of the question: DDTree 2604.12989, whose trees are cheap to grow, so that their size is the target's to say.
B batch, N nodes, D depth. Oracle: trees of each size, decoded (tests/lab/planning/test_budget.py).

`best_first` gives the likeliest nodes first, so that the tree of N nodes is the beginning of every larger one: a few
steps with the largest say of each size how far the target would have followed it. A step's time is the target's
forward over N nodes: on a TPU the longer of its bytes and its arithmetic by the published figures that `plan` uses,
elsewhere as it is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.core import decode, struct
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import size_of
from mars_jax.core.types import Drafter, ForwardOutput, Params, PyTree, Verdict, Visible
from mars_jax.drafters import Dynamic, LoadedDrafter
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.planning.chips import CHIPS
from mars_jax.lab.planning.constants import SPEEDS
from mars_jax.lab.planning.fit import read_once
from mars_jax.models.config import ModelConfig
from mars_jax.serve.generation import rule_of
from mars_jax.serve.prepare import AnyRule, of_mesh, prepared
from mars_jax.serve.requests import Request

BUDGETS = (30, 40, 60, 80, 128, 192, 256)
"""Nodes of the trees that are chosen from, the root among them."""
STEPS = 16
"""Of the trial: with a batch of 8 some hundred paths, by which tau is known to about 5%."""
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
"""Generations by what JAX calls their devices."""


class Budget(NamedTuple):
    """The tree that gives the most tokens a second of those that were compared."""

    nodes: int
    tau: dict[int, float]  # tokens a step, by the number of nodes
    seconds: dict[int, float]  # of the target's forward
    measured: bool  # or by the figures of the chip

    def describe(self) -> str:
        """In one line.

        >>> Budget(60, {30: 3.0, 60: 3.5}, {30: 0.005, 60: 0.0053}, True).describe()
        '60 nodes: 3.50 tokens a step; a node costs 10.0 us of 5.3 ms, measured'
        """
        least, most = min(self.seconds), max(self.seconds)
        node = (self.seconds[most] - self.seconds[least]) / (most - least)
        how = "measured" if self.measured else "by the chip's figures"
        took = f"{1e6 * node:.1f} us of {1e3 * self.seconds[self.nodes]:.1f} ms"
        return f"{self.nodes} nodes: {self.tau[self.nodes]:.2f} tokens a step; a node costs {took}, {how}"


def choose(
    target: Pretrained,
    load: Callable[[Dynamic], LoadedDrafter],
    requests: Sequence[Request],
    *,
    rule: AnyRule,
    rows: int,
    top_k: int = 10,
    depth: int,
) -> Budget:
    """The budget of a block drafter's tree for a target on the devices where it is.

    Args:
      target: with its weights.
      load: makes the drafter with a tree.
      requests: of which the first `rows` are tried for some steps.
      rule: by which they are decoded; its numbers are one for all, or one for each request.
      rows: B.
      top_k, depth: of the tree.

    Raises:
      MarsError: there are several processes, which might choose differently, or the drafter's trees are not made of
        independent marginals.
    """
    if jax.process_count() > 1:
        raise MarsError(
            "several processes might choose different trees: name the tree, as in --tree dynamic:10-7-60."
        )
    largest = Dynamic(top_k, depth, max(BUDGETS))
    sizes = [size for size in BUDGETS if size <= largest.num_nodes] or [largest.num_nodes]
    drafts = load(dataclasses.replace(largest, nodes=max(sizes)))
    if not drafts.drafter.name.startswith("dflash("):
        raise MarsError(
            f"the tree of the drafter '{drafts.drafter.name}' is not chosen by its nodes' cost, since its tokens "
            "depend on each other: name the tree, as in --tree dynamic:10-7-60."
        )
    rows = min(rows, len(requests))
    rule = rule_of(rule, range(rows), len(requests))
    tau = _tau(target, drafts, requests[:rows], rule, sizes)
    seconds = {size: by_figures(target, rows * size) for size in sizes}
    measured = None in seconds.values()
    if measured:
        seconds = _measured(target, rows, sizes)
    found: dict[int, float] = {size: value for size, value in seconds.items() if value is not None}
    best = max(sizes, key=lambda size: tau[size] / found[size])
    return Budget(best, tau, found, measured)


def by_figures(target: Pretrained, tokens: int, kind: str | None = None) -> float | None:
    """Seconds of a forward over so many tokens by the figures of `planning`, None of a device that is no known TPU.

    Args:
      target: with its weights, or abstract ones.
      tokens: B * N.
      kind: of the devices, as JAX calls them; default: of those that are there.
    """
    generation = KINDS.get(jax.devices()[0].device_kind if kind is None else kind)
    if generation is None or not isinstance(target.config, ModelConfig):
        return None
    # JAX sees a v4 chip as one device.
    chip, speed = CHIPS[generation], SPEEDS[generation]
    tokens = -(-tokens // size_of("data", target.mesh))
    read = read_once(target.config, target.params, tokens=tokens)
    # Two operations for each weight and token, of experts only those that a token takes.
    weights = read_once(target.config, target.params, tokens=1) / _bytes_of(target.params)
    return max(read / chip.bandwidth, 2 * weights * tokens / speed.peak_bf16)


def _bytes_of(params: PyTree) -> int:
    """Of a number of the matrices."""
    leaves = [x for x in jax.tree.leaves(params["layers"]) if x.ndim > 1]
    return max(leaves, key=lambda x: x.size).dtype.itemsize


@struct.dataclass(kw_only=True)
class _Watched:
    """A drafter's state, and how far the target followed the last tree."""

    state: PyTree
    path: jax.Array  # i32[B, D + 1]
    accepted: jax.Array  # i32[B]


@functools.lru_cache
def _watched(drafter: Drafter) -> Drafter:
    """The drafter, whose state also says which nodes were accepted."""
    observe = drafter.observe

    def init(params: Params, tokens: jax.Array, length: jax.Array) -> _Watched:
        batch = tokens.shape[0]
        return _Watched(
            state=drafter.init(params, tokens, length),
            path=jnp.zeros((batch, drafter.max_depth + 1), jnp.int32),
            accepted=jnp.zeros((batch,), jnp.int32),
        )

    def propose(params: Params, state: _Watched, given: Any) -> tuple[Any, _Watched]:
        tree, inner = drafter.propose(params, state.state, given)
        return tree, dataclasses.replace(state, state=inner)

    def update(
        params: Params, state: _Watched, tree: Any, verdict: Verdict, output: ForwardOutput, length: jax.Array
    ) -> _Watched:
        inner = drafter.update(params, state.state, tree, verdict, output, length)
        return _Watched(state=inner, path=verdict.path, accepted=verdict.num_accepted)

    def observed(params: Params, state: _Watched, *rest: Any) -> _Watched:
        assert observe is not None  # of a drafter that reads its target
        return dataclasses.replace(state, state=observe(params, state.state, *rest))

    return drafter._replace(init=init, propose=propose, update=update, observe=observe and observed)


def _tau(
    target: Pretrained,
    drafts: LoadedDrafter,
    requests: Sequence[Request],
    rule: AnyRule,
    sizes: Sequence[int],
) -> dict[int, float]:
    """Tokens a step with the first nodes of the tree, by their number."""
    made = prepared(target, LoadedDrafter(_watched(drafts.drafter), drafts.params), requests, verify=rule)
    batch = of_mesh(target, len(requests))
    state = made.start([*range(len(requests)), *[None] * (batch - len(requests))])
    followed, steps = dict.fromkeys(sizes, 0), 0
    for _ in range(STEPS):
        live = ~np.asarray(state.done)
        if not live.any():
            break
        with target.on_mesh():
            state, _ = decode.jitted_step(made.decoder, made.params, state)
        path, accepted = np.asarray(state.draft.path)[live], np.asarray(state.draft.accepted)[live]
        taken = (np.arange(path.shape[1]) > 0) & (np.arange(path.shape[1]) <= accepted[:, None])
        steps += len(path)
        for size in sizes:
            followed[size] += int(np.sum(taken & (path < size)))
    return {size: 1 + followed[size] / max(steps, 1) for size in sizes}


def _measured(target: Pretrained, rows: int, sizes: Sequence[int]) -> dict[int, float | None]:
    """Seconds of the target's forward with its logits over the smallest and the largest tree, and by a line between."""
    batch = of_mesh(target, rows)
    ends = sorted({min(sizes), max(sizes)})
    model, runs = target.model, {}

    @jax.jit
    def forward(params: PyTree, tokens: jax.Array, cache: PyTree) -> jax.Array:
        first = jnp.zeros((tokens.shape[0],), jnp.int32)
        output = model.forward(params, tokens, Visible.causal(first, tokens.shape[1]), cache)
        return jnp.max(model.unembed(params, output.hidden))

    with target.on_mesh():
        for size in ends:
            given = jnp.zeros((batch, size), jnp.int32), model.init_cache(batch, size)
            jax.block_until_ready(forward(target.params, *given))
            runs[size] = given
        times: dict[int, list[float]] = {size: [] for size in ends}
        for _ in range(7):
            for size, given in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(forward(target.params, *given))
                times[size].append(time.perf_counter() - began)
    low, high = (statistics.median(times[size]) for size in (ends[0], ends[-1]))
    slope = max(high - low, 0.0) / max(ends[-1] - ends[0], 1)
    return {size: low + slope * (size - ends[0]) for size in sizes}
