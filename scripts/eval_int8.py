"""The effect of weights in 8 bits on the embedded family: logits, tokens per target forward, solved problems.

    python scripts/eval_int8.py --output scripts/results/eval_int8.json

Prompts are held-out arithmetic problems. Logits are compared at every position of the answers that the bfloat16 target
gives: the distance of bfloat16 from float32 activations (the weights of the family are bfloat16) stands beside that of
int8 from bfloat16. Tau is of a chain of 5 at temperature 0, target and draft of one dtype, and of an int8 target with
the bfloat16 draft.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mars_jax as mj
from mars_jax import assets
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.training.objectives import predict

CHAIN, ANSWER_TOKENS, ROWS = 5, 128, 32


def logits_of(target: mj.Pretrained, tokens: np.ndarray) -> np.ndarray:
    """f32[B, N, V] of whole texts, 8 rows at a time."""
    forward = jax.jit(lambda params, ids: predict(target.model, params, ids, jnp.zeros_like(ids)))
    parts = [forward(target.params, jnp.asarray(tokens[i : i + 8])) for i in range(0, len(tokens), 8)]
    return np.concatenate([np.asarray(part, np.float32) for part in parts])


def distance(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Of logits [positions, V] from those they replace."""
    error = ours - theirs

    def log_softmax(z: np.ndarray) -> np.ndarray:
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    p, q = log_softmax(theirs.astype(np.float64)), log_softmax(ours.astype(np.float64))
    top = np.sort(theirs, axis=-1)[:, -2:]
    return {
        "rms_error": float(np.sqrt(np.mean(np.square(error)))),
        "rms_error_over_rms_logit": float(np.sqrt(np.mean(np.square(error)) / np.mean(np.square(theirs)))),
        "max_error": float(np.abs(error).max()),
        "kl_nats": float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1))),
        "same_argmax": float(np.mean(ours.argmax(-1) == theirs.argmax(-1))),
        "median_gap_of_top_two": float(np.median(top[:, 1] - top[:, 0])),
        "positions": len(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="raw JSON")
    parser.add_argument("--problems", type=int, default=320)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "environment": {"python": platform.python_version(), "jax": jax.__version__, "cores": os.cpu_count()}
    }

    def keep(name: str, value: Any) -> None:
        report[name] = value
        args.output.write_text(json.dumps(report, indent=1) + "\n")
        print(name, json.dumps(value), flush=True)

    problems = list(arithmetic.generate(args.problems, split="eval"))
    targets = {dtype: mj.load(assets.TARGET, dtype=dtype) for dtype in ("float32", "bfloat16", "int8")}
    for dtype in ("bfloat16", "int8"):
        keep(f"bytes of {dtype}", sum(x.nbytes for x in jax.tree.leaves(targets[dtype].params)))

    results = {}
    for of_target, of_draft in (("bfloat16", "bfloat16"), ("int8", "int8"), ("int8", "bfloat16")):
        target = targets[of_target]
        drafter = mj.drafters.load(f"model:{assets.DRAFT}", target, num_draft_tokens=CHAIN, dtype=of_draft)
        for rule in (mj.verify.exact(), mj.verify.mars(theta=0.9)):
            result = mj.generate(
                target,
                drafter,
                [p.question for p in problems],
                chat=True,
                verify=rule,
                max_new_tokens=ANSWER_TOKENS,
                batch_size=ROWS,
            )
            right = [arithmetic.is_correct(p, text) for p, text in zip(problems, result.text, strict=True)]
            results[of_target, of_draft, rule.name] = result
            keep(
                f"{of_target} target, {of_draft} draft, {rule.name}",
                {"tau": result.metrics.tau, "accuracy": float(np.mean(right)), "problems": len(problems)},
            )
    reference = results["bfloat16", "bfloat16", "exact"]
    same = [a == b for a, b in zip(results["int8", "int8", "exact"].tokens, reference.tokens, strict=True)]
    keep("answers that are the same, token for token", float(np.mean(same)))

    texts = [[*c.request.prompt_tokens, *c.tokens] for c in reference.completions]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    answered = np.zeros(tokens.shape, bool)  # positions whose logits chose a token of the answer
    for row, (text, completion) in enumerate(zip(texts, reference.completions, strict=True)):
        tokens[row, : len(text)] = text
        answered[row, len(completion.request.prompt_tokens) - 1 : len(text) - 1] = True
    logits = {dtype: logits_of(target, tokens)[answered] for dtype, target in targets.items()}
    keep("logits, bfloat16 from float32", distance(logits["bfloat16"], logits["float32"]))
    keep("logits, int8 from bfloat16", distance(logits["int8"], logits["bfloat16"]))


if __name__ == "__main__":
    main()
