"""Measure tokens per second without a draft, and the loss on a fixed text, for each dtype of the weights.

    python -m scripts.checks.cpu_bits --keep scripts/results/cpu_bits.json

The same prompt is decoded greedily in each dtype, and also by transformers from the same file in float32 and bfloat16.
All variants take turns in one process. `stand-in` is the model of scripts/checks/first_token.py. `qwen2.5-0.5b` has the
shapes of Qwen2.5-0.5B but is not stored in a file, so it is not compared with transformers. The weights of `stand-in`
and `qwen2.5-0.5b` are random. The loss is the cross-entropy per token; it is not measured for models with random
weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mars_jax as mj
from kernels_pallas.int4.xla import dequantised
from mars_jax.hub.files import resolve
from mars_jax.models import quantize
from mars_jax.models.config import ModelConfig, Rope
from mars_jax.models.transformer import init_params, language_model
from mars_jax.models.weights import build_rows, get, leaves
from scripts import common
from scripts.checks.first_token import write_stand_in
from scripts.smollm2.torch_side import Transformers

DTYPES = ("float32", "bfloat16", "int8", "int4")
MODELS = ("tiny/target", "smollm2", "stand-in", "qwen2.5-0.5b")
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
    """Return a model with the shapes of Qwen2.5-0.5B and random weights in `dtype`."""
    params = init_params(_SHAPES, jax.random.key(0))
    floating = "bfloat16" if dtype == "bfloat16" else "float32"
    bits = {"int8": 8, "int4": 4}.get(dtype)

    def read(leaf: Any) -> Any:
        weight = get(params, leaf.path)
        match quantize.bits_of(leaf, bits):
            case 8:
                return quantize.quantize(weight)
            case 4:
                # Widen 4-bit matrices, as `load` does on a CPU.
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
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the stand-in"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the results to this JSON file")
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
    """Return the speed and the loss of a model, keyed by dtype. The keys for transformers are "transformers, DTYPE"."""
    source = str(write_stand_in(args.folder / "stand-in-270m.gguf")) if name == "stand-in" else name
    random = name in ("stand-in", "qwen2.5-0.5b")
    load = random_target if name == "qwen2.5-0.5b" else partial(mj.load, source)
    targets = {dtype: load(dtype=dtype) for dtype in DTYPES}
    first = targets["float32"]
    prompt = list(range(300, 312)) if random else first.tokenizer(PROMPT)["input_ids"]
    arms: dict[str, Callable[[], list[int]]] = {
        dtype: partial(_decode, target, prompt, args.new_tokens) for dtype, target in targets.items()
    }
    if name != "qwen2.5-0.5b":
        for dtype in ("float32", "bfloat16"):
            peer = Transformers(resolve(source), dtype)
            arms[f"transformers, {dtype}"] = lambda peer=peer: peer.generate([prompt], args.new_tokens)[0]
    seconds = common.in_turns(arms, args.turns)
    rates = {arm: (args.new_tokens / times).tolist() for arm, times in seconds.items()}
    best = max(statistics.median(rates[dtype]) for dtype in DTYPES)
    report: dict[str, dict[str, Any]] = {
        arm: {
            "tokens_per_s": round(statistics.median(measured), 1),
            "of_best": round(statistics.median(measured) / best, 3),
            "rates": [round(rate, 1) for rate in measured],
        }
        for arm, measured in rates.items()
    }
    for dtype, target in targets.items():
        report[dtype]["loss"] = None if random else loss(target)
    expected = arms["float32"]()
    for arm in set(arms) - set(DTYPES):
        report[arm]["tokens_as_float32"] = sum(a == b for a, b in zip(arms[arm](), expected, strict=True))
    return report


def _decode(target: mj.Pretrained, prompt: list[int], new: int) -> list[int]:
    [text] = mj.generate(target, mj.drafters.none(), [prompt], max_new_tokens=new, stop_tokens=()).completions
    return list(text.tokens)


def loss(target: mj.Pretrained) -> float:
    """Return the loss on `TEXT` in nats per token."""
    [scored] = mj.score(target, [TEXT])
    return round(-float(np.mean(scored.log_p)), 5)


if __name__ == "__main__":
    main()
