"""Measure tokens per second without a draft, and the loss on a fixed text, for each dtype of the weights.

    python -m scripts.checks.cpu_bits --keep scripts/results/cpu_bits.json

The dtypes take turns to decode the same prompt greedily. `qwen2.5-0.5b` has the shapes of that model and random
weights. The loss is the cross-entropy per token. It is not measured for random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mars_jax as mj
from kernels_pallas.int4.xla import dequantised
from mars_jax.models import quantize
from mars_jax.models.config import ModelConfig, Rope
from mars_jax.models.transformer import init_params, language_model
from mars_jax.models.weights import build_rows, get, leaves
from scripts import common

DTYPES = ("float32", "bfloat16", "int8", "int4")
MODELS = ("tiny/target", "smollm2", "qwen2.5-0.5b")
PROMPT = "The history of the lighthouse begins with a storm in the year"
TEXT = (
    "When the mill closed, most people in the valley expected the town to empty within a year. Instead, the workers "
    "pooled their savings, bought two of the looms at auction, and began to weave blankets for hotels along the coast. "
    "Within ten years they employed more people than the mill had. Visitors who ask for the secret are shown a ledger: "
    "every blanket that came back is listed with the reason, and next to each reason stands who fixed it."
)
_SHAPES = ModelConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    rope=Rope(theta=1e6),
    tie_embeddings=True,
    qkv_bias=True,
)


def random_target(dtype: str) -> mj.Pretrained:
    """Return a model with the shapes of Qwen2.5-0.5B, in a dtype."""
    params = init_params(_SHAPES, jax.random.key(0))
    floating = "bfloat16" if dtype == "bfloat16" else "float32"
    bits = {"int8": 8, "int4": 4}.get(dtype)

    def read(leaf: Any) -> Any:
        weight = get(params, leaf.path)
        match quantize.bits_of(leaf, bits):
            case 8:
                return quantize.quantize(weight)
            case 4:
                # As in `load`, 4-bit matrices are widened on a CPU.
                matrix = quantize.quantize_4(np.asarray(weight))
                return dequantised(matrix.values, matrix.scale, matrix.offset).astype(floating)
            case _:
                return weight.astype(floating)

    model = language_model(_SHAPES, dtype=floating, cache_dtype="float32")
    return mj.Pretrained.from_parts(model, build_rows(leaves(_SHAPES), read), config=_SHAPES)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each dtype; default: 5")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the figures to this JSON file")
    args = parser.parse_args()
    report: dict[str, Any] = common.provenance() | {
        "new_tokens": args.new_tokens,
        "turns": args.turns,
        "models": {},
    }
    for name in args.models:
        rows = report["models"][name] = measure(name, args)
        for dtype, row in rows.items():
            print(name, dtype, row, flush=True)
    common.write(args.keep, report)


def measure(name: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of a model, keyed by dtype."""
    load = random_target if name == "qwen2.5-0.5b" else lambda dtype: mj.load(name, dtype=dtype)
    targets = {dtype: load(dtype) for dtype in DTYPES}
    prompt: Any = PROMPT if targets["float32"].has_tokenizer else list(range(100, 112))
    options = {"max_new_tokens": args.new_tokens, "stop_tokens": ()}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for turn in range(1 + args.turns):
        for dtype, target in targets.items():
            began = time.perf_counter()
            mj.generate(target, mj.drafters.none(), [prompt], **options)
            if turn:  # the first turn compiles
                seconds[dtype].append(args.new_tokens / (time.perf_counter() - began))
    best = max(map(statistics.median, seconds.values()))
    return {
        dtype: {
            "tokens_per_s": round(statistics.median(rates), 1),
            "of_best": round(statistics.median(rates) / best, 3),
            "rates": [round(rate, 1) for rate in rates],
            "loss": loss(targets[dtype]),
        }
        for dtype, rates in seconds.items()
    }


def loss(target: mj.Pretrained) -> float | None:
    """Return nats per token of `TEXT`, or None if the model has no tokenizer."""
    if not target.has_tokenizer:
        return None
    [scored] = mj.score(target, [TEXT])
    return round(-float(np.mean(scored.log_p)), 5)


if __name__ == "__main__":
    main()
