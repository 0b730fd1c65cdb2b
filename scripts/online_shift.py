"""A drafter that learns as it decodes: from stories to word problems, for a draft model and for an EAGLE-3 head.

    python scripts/online_shift.py --stories tinystories_heldout.txt.xz --output scripts/results/online_shift.json

The shipped drafters know both domains, so each kind is first distilled from the target on stories alone, from random
layers: that is the stale one. Then `mars_jax.lab.training.online.Refiner` sees what it decodes of word problems, batch
by batch, and learns at the rejected tokens, beside old stories. tau is tokens per target forward of greedy decoding, on
word problems and on beginnings of stories that no training saw; the expected tau of held-out stories is the guard's
own. What the decode loop compiles after the first round is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import mars_jax as mj
from mars_jax import drafters, hub
from mars_jax.core import decode, refill
from mars_jax.core.types import CORRECTED
from mars_jax.lab.evaluate.tasks import catalogue
from mars_jax.lab.training import online
from mars_jax.lab.training.data import documents
from mars_jax.models import eagle_head, init_params

DEPTH, WIDTH, NEW, ROWS, BATCH = 4, 112, 40, 16, 4
HELD_OUT = 8


def stories(target: mj.Pretrained, path: Path) -> list[list[int]]:
    return [target.encode(text)[:WIDTH] for text in documents(path)]


def problems(target: mj.Pretrained, count: int) -> list[list[int]]:
    return [
        target.encode(problem.turns[0], chat=True)
        for problem in catalogue.read("arithmetic", chat=True, limit=count)
    ]


def untrained(kind: str, target: mj.Pretrained) -> tuple[Any, Any, Any]:
    """(the draft, random params with the shipped embedding or unembedding, params -> what drafts)."""
    if kind == "model":
        small = mj.load("tiny/draft", dtype="float32")
        params = dict(init_params(small.config, jax.random.key(1)))
        params["embed"] = small.params["embed"]
        chain = drafters.language_model(small.model, DEPTH)
        return small.model, params, lambda params: drafters.LoadedDrafter(chain, params)
    config, shipped = hub.load_eagle("tiny/eagle3", target.config, target.params, dtype="float32")
    params = dict(eagle_head.init_params(config, jax.random.key(1)))
    for name in ("ids", "unembed", "norm"):
        if name in shipped:
            params[name] = shipped[name]
    size = target.config.hidden_size
    params["fc"] = params["fc"].at[:, -size:].add(np.eye(size, dtype=np.float32))
    chain = drafters.eagle(config, target.model, DEPTH, cache_dtype="float32")
    return config, params, lambda params: drafters.LoadedDrafter(chain, params)


def refiner_of(target: mj.Pretrained, draft: Any, params: Any, texts: list[list[int]], lr: float) -> Any:
    return online.Refiner(
        target.model,
        draft,
        params,
        depth=DEPTH,
        held_out=texts[:HELD_OUT],
        old=texts[HELD_OUT:],
        target_params=target.params,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr)),
        rows=128,
        width=WIDTH,
        batch_size=BATCH,
    )


def taught(target: mj.Pretrained, draft: Any, params: Any, texts: list[list[int]], updates: int) -> Any:
    """The params after updates on every token of stories."""
    refiner = refiner_of(target, draft, params, texts, 2e-3)
    rest = texts[HELD_OUT : HELD_OUT + 128]
    tokens, length = np.zeros((len(rest), WIDTH), np.int32), np.asarray([len(ids) for ids in rest], np.int32)
    for row, ids in enumerate(rest):
        tokens[row, : len(ids)] = ids
    kind = np.full(tokens.shape, CORRECTED, np.int32)
    refiner.see(tokens, np.ones(len(rest), np.int32), length, kind)
    for _ in range(max(updates // 50, 1)):
        found = refiner.refine(target.params, steps=50)
        print(f"stories: loss {found.loss:.2f}, held-out tau {found.after:.2f}", flush=True)
    return refiner.params


def decoded(target: mj.Pretrained, drafter: Any, prompts: list[list[int]], **options: Any) -> Any:
    return mj.generate(
        target, drafter, prompts, verify=mj.verify.exact(), max_new_tokens=NEW, batch_size=ROWS, **options
    )


def compiled() -> int:
    """Programs of the decode loop."""
    found: Any = (decode.run, decode._start, refill.advance, refill._refill)
    return sum(f._cache_size() for f in found)


def measured(
    kind: str, target: mj.Pretrained, texts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    draft, params, drafter_of = untrained(kind, target)
    began = time.time()
    params = taught(target, draft, params, texts, args.story_updates)
    asked = problems(target, args.rounds * args.prompts + args.held_out)
    new = asked[-args.held_out :]
    old = [ids[:16] for ids in texts[:HELD_OUT]]
    stale = {"new": decoded(target, drafter_of(params), new), "old": decoded(target, drafter_of(params), old)}
    refiner = refiner_of(target, draft, params, texts, args.rate)
    rows, programs = [], []
    for turn in range(args.rounds):
        prompts = asked[turn * args.prompts : (turn + 1) * args.prompts]
        found = decoded(target, drafter_of(refiner.params), prompts, log_probs=True)
        programs.append(compiled())
        refiner.see_completions(found.completions)
        update = refiner.refine(target.params, steps=args.updates)
        rows.append(
            {
                "tau": found.metrics.tau,
                "loss": update.loss,
                "kept": update.kept,
                "held_out_before": update.before,
                "held_out_after": update.after,
            }
        )
        print(kind, turn, json.dumps(rows[-1]), flush=True)
    fresh = drafter_of(refiner.params)
    refreshed = {"new": decoded(target, fresh, new), "old": decoded(target, fresh, old)}
    taus = {
        name: {"stale": stale[name].metrics.tau, "refreshed": refreshed[name].metrics.tau} for name in stale
    }
    return {
        "tau": taus,
        "new_ratio": taus["new"]["refreshed"] / taus["new"]["stale"],
        "old_ratio": taus["old"]["refreshed"] / taus["old"]["stale"],
        "guard_ratio": rows[-1]["held_out_after"] / rows[0]["held_out_before"],
        "texts_that_differ": sum(
            a != b for name in stale for a, b in zip(stale[name].tokens, refreshed[name].tokens, strict=True)
        ),
        "compiled_after_the_first_round": programs[-1] - programs[0],
        "rounds": rows,
        "seconds": time.time() - began,
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--stories", type=Path, required=True)
    flags.add_argument("--kinds", nargs="+", default=["model", "eagle"], choices=["model", "eagle"])
    flags.add_argument("--story-updates", type=int, default=150, help="of the stale drafter")
    flags.add_argument("--rounds", type=int, default=6)
    flags.add_argument("--prompts", type=int, default=32, help="of a round")
    flags.add_argument("--updates", type=int, default=12, help="after a round")
    flags.add_argument("--rate", type=float, default=1e-3, help="of the updates' optimizer")
    flags.add_argument(
        "--held-out", type=int, default=32, help="problems that are measured and never learned"
    )
    flags.add_argument("--output", type=Path)
    args = flags.parse_args()
    target = mj.load("tiny/target", dtype="float32")
    texts = stories(target, args.stories)
    report: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        report = json.loads(args.output.read_text())
    report["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": platform.machine(),
        "jax": jax.__version__,
    }
    report["settings"] = {
        name: value for name, value in vars(args).items() if isinstance(value, int | float)
    } | {
        "depth": DEPTH,
        "width": WIDTH,
        "new_tokens": NEW,
        "batch_size": ROWS,
        "texts_of_an_update": 2 * BATCH,
    }
    for kind in args.kinds:
        report[kind] = measured(kind, target, texts, args)
        print(kind, json.dumps({k: v for k, v in report[kind].items() if k != "rounds"}), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
