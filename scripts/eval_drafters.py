"""Measure the drafters on the embedded family: losslessness, acceptance, and what a dynamic tree costs.

    python scripts/eval_drafters.py --stories heldout.txt.xz --output scripts/results/eval_drafters.json

tau is tokens per target forward. All drafters get the same prompts and seeds, and a relaxed rule the same tree as the
strict one. Costs are medians of decodes taken in turns in one process; every single time is in the JSON.
`--only` runs some parts and `--drafters` some drafters; the others' figures are kept.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import common
from eval_embedded import acceptance, story_prompts

import mars_jax as mj
from mars_jax import assets
from mars_jax.drafters import Dynamic
from mars_jax.lab.training.data import documents

CHAIN = 5
TREE = Dynamic(top_k=10, depth=7, nodes=60)
STATIC = (1, 1, 3, 2, 2, 1, 2)  # as deep, and also of 60 nodes


def drafters(target: mj.Pretrained, heads: dict[str, str]) -> dict[str, Any]:
    """Every drafter by its name in the report."""
    draft = f"model:{assets.DRAFT}"
    made = {
        "model chain": mj.drafters.load(draft, target, num_draft_tokens=CHAIN, dtype="float32"),
        "model dynamic tree": mj.drafters.load(draft, target, tree=TREE, dtype="float32"),
        "model static tree": mj.drafters.load(draft, target, tree=STATIC, dtype="float32"),
        "ngram": mj.drafters.load("ngram", target),
    }
    for name, spec in heads.items():
        made[f"{name} chain"] = mj.drafters.load(spec, target, num_draft_tokens=CHAIN, dtype="float32")
        if not spec.startswith("medusa:"):
            made[f"{name} dynamic tree"] = mj.drafters.load(spec, target, tree=TREE, dtype="float32")
            made[f"{name} static tree"] = mj.drafters.load(spec, target, tree=STATIC, dtype="float32")
        else:
            made[f"{name} static tree"] = mj.drafters.load(spec, target, tree=(4, 3, 2), dtype="float32")
    return made


def lossless(target: mj.Pretrained, made: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Prompts whose greedy continuation is that of autoregression, token for token, in float32 and ragged batches."""
    ragged = [ids[: 2 + i % len(ids)] for i, ids in enumerate(prompts)]
    options: dict[str, Any] = {"max_new_tokens": 96, "batch_size": 16}
    plain = mj.generate(target, "none", ragged, **options).tokens
    equal = {}
    for name, drafter in made.items():
        tokens = mj.generate(target, drafter, ragged, verify=mj.verify.exact(), **options).tokens
        equal[name] = sum(a == b for a, b in zip(tokens, plain, strict=True))
    return {"prompts": len(ragged), "equal": equal}


def cost(target: mj.Pretrained, made: dict[str, Any], prompt: list[int], repeats: int) -> dict[str, Any]:
    """Milliseconds of a step at batch 1: a decode with a rule that accepts next to nothing, over its steps."""
    from mars_jax.serve.session import Session

    requests = mj.make_requests(target, [prompt], max_new_tokens=96, ignore_eos=True, temperature=1.0)
    steps: dict[str, int] = {}

    def decode(name: str) -> None:
        [done] = Session.of(target, made[name], mj.verify.exact()).run(requests)
        steps[name] = done.metrics.steps

    found = common.in_turns({name: functools.partial(decode, name) for name in made}, repeats)
    times = {name: (1e3 * seconds / steps[name]).tolist() for name, seconds in found.items()}
    return {name: {"milliseconds": statistics.median(ts), "all": ts} for name, ts in times.items()}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stories", type=Path, required=True, help="held-out stories")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=128, help="stories to continue")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--head",
        nargs=2,
        action="append",
        metavar=("NAME", "SPEC"),
        help="heads for the embedded target (default: eagle3 eagle:tiny/eagle3 and dflash dflash:tiny/dflash)",
    )
    parser.add_argument("--drafters", nargs="*", default=(), help="take only those of these names")
    parts = ("lossless", "acceptance", "cost")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    args = parser.parse_args()
    report = common.kept(args.output)

    def keep(name: str, value: Any) -> None:
        report[name] = value | {"made": common.stamp()}
        common.write(args.output, report)
        print(name, json.dumps(value), flush=True)

    target = mj.load(assets.TARGET, dtype="float32")
    report["environment"] = common.provenance(data=[args.stories], target=target.params)
    heads: dict[str, str] = dict(
        args.head or [("eagle3", f"eagle:{assets.EAGLE3}"), ("dflash", f"dflash:{assets.DFLASH}")]
    )
    made = drafters(target, heads)
    made = {name: drafter for name, drafter in made.items() if name in args.drafters or not args.drafters}
    prompts = story_prompts(target, list(documents(args.stories)), args.prompts)
    exact, mars = mj.verify.exact(), mj.verify.mars(theta=0.9)
    if "lossless" in args.only:
        keep("lossless", lossless(target, made, prompts[:64]))
    if "acceptance" in args.only:
        for name, drafter in made.items():
            for rule, t in ((exact, 0.0), (exact, 1.0), (mars, 1.0)):
                key = f"stories, {name}, {rule.name}, temperature {t:g}"
                keep(key, acceptance(target, drafter, rule, prompts, temperature=t))
    if "cost" in args.only:
        trees = {name: d for name, d in made.items() if "tree" in name}
        keep("cost", cost(target, trees, prompts[0], args.repeats))


if __name__ == "__main__":
    main()
