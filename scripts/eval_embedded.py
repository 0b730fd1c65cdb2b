"""Measure the embedded family: bits per byte, arithmetic, acceptance and speed.

    python scripts/eval_embedded.py --stories heldout.txt.xz --output scripts/results/eval_embedded.json

Acceptance is tau, tokens per target forward, of a chain of 5; strict and relaxed rules get the same prompts and seeds.
Rates are those of `--compare`: medians of runs taken in turns. Start-up is a fresh process, with an empty compilation
cache and again with the one that it left. `--only` runs some parts and keeps the others' figures.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mars_jax as mj
from mars_jax import assets
from mars_jax.contrib.teaching import predict
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.training.data import documents

CHAIN = 5
PROMPT_TOKENS, NEW_TOKENS = 24, 160  # of a story
ANSWER_TOKENS = 128


def bits_per_byte(pretrained: mj.Pretrained, texts: Sequence[str], *, rows: int = 16) -> dict[str, float]:
    """Of whole documents, each after the separator; one longer than the model's context is scored in pieces.

    `with_end` counts predicting where a document ends too.
    """
    separator, longest = pretrained.config.bos_token_id, pretrained.config.max_positions - 1
    assert separator is not None
    pieces: list[list[int]] = []
    ends = []
    for text in texts:
        ids = pretrained.encode(text)
        if ids[0] != separator:
            raise SystemExit(f"{pretrained.name} does not put a separator before a text")
        ids = [*ids[1:], pretrained.stop_tokens[0]]
        pieces += (cut := [ids[i : i + longest] for i in range(0, len(ids), longest)])
        ends += [i == len(cut) - 1 for i in range(len(cut))]

    @jax.jit
    def losses(params, tokens, segments):
        logits = predict(pretrained.model, params, tokens[:, :-1], segments)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    inside = end = 0.0
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i]))
    for group in (order[i : i + rows] for i in range(0, len(order), rows)):
        width = -(-max(len(pieces[i]) for i in group) // 64) * 64
        tokens = np.zeros((rows, width + 1), np.int32)
        for row, i in enumerate(group):
            tokens[row, : len(pieces[i]) + 1] = [separator, *pieces[i]]
        values = np.asarray(
            losses(pretrained.params, tokens, jnp.zeros((rows, width), jnp.int32)), np.float64
        )
        for row, i in enumerate(group):
            count = len(pieces[i])
            last = values[row, count - 1] if ends[i] else 0.0
            inside += values[row, :count].sum() - last
            end += last
    size = sum(len(text.encode()) for text in texts)
    tokens_inside = sum(map(len, pieces)) - len(texts)
    return {
        "bits_per_byte": float(inside / np.log(2) / size),
        "bits_per_byte_with_end": float((inside + end) / np.log(2) / size),
        "bytes_per_token": size / tokens_inside,
        "documents": len(texts),
    }


def solve(target, drafter, rule, count: int, *, temperature: float, rows: int = 32) -> dict[str, Any]:
    """Accuracy on held-out problems, by number of steps, and tau."""
    problems = list(arithmetic.generate(count, split="eval"))
    result = mj.generate(
        target,
        drafter,
        [p.question for p in problems],
        chat=True,
        verify=rule,
        temperature=temperature,
        max_new_tokens=ANSWER_TOKENS,
        batch_size=rows,
    )
    right: dict[int, list[bool]] = collections.defaultdict(list)
    for p, text in zip(problems, result.text, strict=True):
        right[p.answer.count(" = ")].append(arithmetic.is_correct(p, text))
    return {
        "accuracy": float(np.mean([x for xs in right.values() for x in xs])),
        "accuracy_by_steps": {str(k): float(np.mean(v)) for k, v in sorted(right.items())},
        "problems": count,
        "tau": result.metrics.tau,
        "relaxed_share": result.metrics.relaxed_share,
    }


def story_prompts(target: mj.Pretrained, texts: Sequence[str], count: int) -> list[list[int]]:
    long = [ids for text in texts if len(ids := target.encode(text)) > 2 * PROMPT_TOKENS]
    return [ids[:PROMPT_TOKENS] for ids in long[:count]]


def acceptance(target, drafter, rule, prompts, *, temperature: float, rows: int = 16) -> dict[str, Any]:
    m = mj.generate(
        target,
        drafter,
        prompts,
        verify=rule,
        temperature=temperature,
        max_new_tokens=NEW_TOKENS,
        batch_size=rows,
    ).metrics
    return {
        "tau": m.tau,
        "relaxed_share": m.relaxed_share,
        "regret_per_token": m.regret_per_token,
        "depth_histogram": m.depth_histogram,
        "prompts": len(prompts),
    }


def speed(dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    """The table of `--compare` for stories at batch 1 and temperature 0: autoregression, exact and mars in turns."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps({"prompt_tokens": ids}) + "\n" for ids in prompts)
        file.flush()
        flags = ["--compare", "--json", "--batch-size", "1", "--max-new-tokens", str(NEW_TOKENS)]
        flags += ["--dtype", dtype, "--prompts-file", file.name]
        command = [sys.executable, "-m", "mars_jax.generate", *flags]
        run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(run.stdout)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stories", type=Path, required=True, help="held-out stories")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--compare-with", nargs="*", default=[], help="other checkpoints, for their bits per byte"
    )
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=128, help="stories to continue")
    parts = ("bits", "arithmetic", "acceptance", "speed")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    args = parser.parse_args()
    texts = list(documents(args.stories))
    report = common.kept(args.output)

    def keep(name: str, value: Any) -> None:
        report[name] = value | {"made": common.stamp()}
        common.write(args.output, report)
        print(name, json.dumps(value), flush=True)

    target = mj.load(assets.TARGET, dtype="float32")
    report["environment"] = common.provenance(data=[args.stories], target=target.params)
    greedy, sampled = (
        mj.drafters.load(
            f"model:{assets.DRAFT}", target, num_draft_tokens=CHAIN, sample=sample, dtype="float32"
        )
        for sample in (False, True)
    )
    exact, rejection = mj.verify.exact(), mj.verify.rejection()
    # Each relaxed rule after the strict rule that it relaxes.
    rules: dict[str, tuple[Any, Any]] = {
        "exact": (greedy, exact),
        "mars over exact": (greedy, mj.verify.mars(base=exact, theta=0.9)),
        "rejection": (sampled, rejection),
        "mars over rejection": (sampled, mj.verify.mars(base=rejection, theta=0.9)),
    }
    cases = [(rule, t) for t in (0.0, 1.0) for rule in (list(rules)[:2] if t == 0 else rules)]
    if "bits" in args.only:
        for name in (assets.TARGET, assets.DRAFT, *args.compare_with):
            keep(f"bits {Path(name).name}", bits_per_byte(mj.load(name, dtype="float32"), texts))
    if "acceptance" in args.only:
        prompts = story_prompts(target, texts, args.prompts)
        for rule, t in cases:
            found = acceptance(target, *rules[rule], prompts, temperature=t)
            keep(f"stories, {rule}, temperature {t:g}", found)
    if "arithmetic" in args.only:
        for rule, t in cases:
            found = solve(target, *rules[rule], args.problems, temperature=t)
            keep(f"arithmetic, {rule}, temperature {t:g}", found)
    if "speed" in args.only:
        for dtype in ("float32", "bfloat16"):
            keep(f"speed {dtype}", speed(dtype, story_prompts(target, texts, 5)))


if __name__ == "__main__":
    main()
