"""What a key-value cache in 8 bits does to the embedded family: solved problems, tokens per target forward, texts.

    python scripts/eval_int8_cache.py --texts heldout.txt.xz --output scripts/results/eval_int8_cache.json

Held-out arithmetic problems at temperature 0, a chain of 5, weights in bfloat16; the target's cache in bfloat16 and in
8 bits, under `exact` and `mars`. The difference of solved problems is paired, with a 95% interval of a bootstrap over
problems. Stories are continued with `exact`, and the target scores what came with either cache: the mean
log-probability of a token, in nats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mars_jax as mj
from mars_jax import assets
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.training.data import documents
from mars_jax.serve.likelihood import score_answers

CHAIN, ANSWER_TOKENS, STORY_TOKENS, ROWS = 5, 128, 96, 32
CACHES = ("bfloat16", "int8")


def interval(differences: np.ndarray) -> dict[str, float]:
    """The mean and its 95% interval."""
    drawn = np.random.default_rng(0).integers(len(differences), size=(10_000, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return {"mean": float(differences.mean()), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, help="stories, a file of documents")
    parser.add_argument("--problems", type=int, default=320)
    parser.add_argument("--stories", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True, help="raw JSON")
    args = parser.parse_args()
    problems = list(arithmetic.generate(args.problems, split="eval"))
    stories = [text[:200] for text in list(documents(args.texts))[: args.stories]]
    targets = {cache: mj.load(assets.TARGET, dtype="bfloat16", cache_dtype=cache) for cache in CACHES}

    def decode(cache: str, prompts: list[str], rule: Any, new: int, *, chat: bool) -> mj.Result:
        target = targets[cache]
        draft = mj.drafters.load(f"model:{assets.DRAFT}", target, num_draft_tokens=CHAIN)
        options: dict[str, Any] = {"max_new_tokens": new, "batch_size": ROWS, "chat": chat}
        return mj.generate(target, draft, prompts, verify=rule, **options)

    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "cores": len(os.sched_getaffinity(0)),
        },
        "arithmetic": [],
        "stories": [],
    }
    for rule in (mj.verify.exact(), mj.verify.mars(theta=0.9)):
        made = {
            cache: decode(cache, [p.question for p in problems], rule, ANSWER_TOKENS, chat=True)
            for cache in CACHES
        }
        right = {
            cache: np.asarray(
                [arithmetic.is_correct(p, text) for p, text in zip(problems, result.text, strict=True)], float
            )
            for cache, result in made.items()
        }
        same = [a == b for a, b in zip(made["int8"].tokens, made["bfloat16"].tokens, strict=True)]
        row = {
            "rule": rule.name,
            "problems": len(problems),
            "accuracy": {cache: float(found.mean()) for cache, found in right.items()},
            "accuracy_int8_minus_bfloat16": interval(right["int8"] - right["bfloat16"]),
            "tau": {cache: result.metrics.tau for cache, result in made.items()},
            "same_answers": float(np.mean(same)),
        }
        report["arithmetic"].append(row)
        print(json.dumps(row), flush=True)
    told = {
        cache: decode(cache, stories, mj.verify.exact(), STORY_TOKENS, chat=False).completions
        for cache in CACHES
    }
    scores = {
        cache: score_answers(
            targets["bfloat16"], [c.request.prompt_tokens for c in made], [c.tokens for c in made]
        )
        for cache, made in told.items()
    }
    means = {cache: np.asarray([nats / count for nats, count in found]) for cache, found in scores.items()}
    row = {
        "stories": len(stories),
        "nats_a_token": {cache: float(found.mean()) for cache, found in means.items()},
        "nats_int8_minus_bfloat16": interval(means["int8"] - means["bfloat16"]),
    }
    report["stories"].append(row)
    print(json.dumps(row), flush=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
