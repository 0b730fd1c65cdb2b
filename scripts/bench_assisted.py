"""`mars` against transformers' assisted generation in PyTorch: same weights, prompts, lengths and threads, in one run.

    python scripts/bench_assisted.py --stories heldout.txt.xz --output scripts/results/bench_assisted.json

The embedded family in float32, which transformers loads from the same files; a greedy chain of 5 drafted by its draft
in both. Every text has the same number of new tokens, stop tokens ignored. All ways are timed in turns (A B A B ...)
after a warm-up of each, over the same prompts; figures are medians, and every single time is in the JSON. Batch 8:
transformers' assisted generation takes one prompt at a time (what it says to more is recorded), so there it goes
through the batch prompt by prompt, and plain batched generate stands beside it. XLA uses the cores that this process
may run on, and PyTorch is given as many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from eval_embedded import CHAIN, story_prompts
from torch_side import Tokens, Transformers

import mars_jax as mj
from mars_jax import assets
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.training.data import documents

THETA = 0.9
BAR = 4.0


def refusal(theirs: Transformers, assistant: Any, prompts: Tokens) -> str | None:
    """Assisted generation's refusal of a batch, or None where it takes it."""
    try:
        theirs.generate(prompts, 2, assistant_model=assistant)
    except ValueError as error:
        return str(error)
    return None


def ways(
    target: mj.Pretrained,
    drafter: Any,
    theirs: Transformers,
    assistant: Any,
    prompts: Tokens,
    batch: int,
    temperature: float,
    new: int,
) -> dict[str, Callable[[], Tokens]]:
    """Each way to continue all prompts, in groups of `batch`."""

    def ours(draft: Any, rule: Any) -> Callable[[], Tokens]:
        return lambda: mj.generate(
            target, draft, prompts, verify=rule, temperature=temperature, max_new_tokens=new, batch_size=batch,
            ignore_eos=True,
        ).tokens  # fmt: skip

    def other(size: int, **how: Any) -> Tokens:
        how |= (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        )
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return [tokens for part in parts for tokens in theirs.generate(part, new, **how)]

    return {
        "transformers generate": lambda: other(batch),
        "transformers assisted": lambda: other(1, assistant_model=assistant),
        "mars-jax autoregressive": ours("none", mj.verify.exact()),
        "mars-jax exact": ours(drafter, mj.verify.exact()),
        f"mars-jax mars({THETA:g})": ours(drafter, mj.verify.mars(theta=THETA)),
    }


def measure(made: dict[str, Callable[[], Tokens]], repeats: int, new: int, *, greedy: bool) -> dict[str, Any]:
    """Seconds of every run, taken in turns, and tokens/s by their median; and, where nothing is drawn, the texts that
    are the ones of plain generate."""
    texts = {name: run() for name, run in made.items()}  # compiles, and warms up
    for name, tokens in texts.items():
        assert all(len(t) == new for t in tokens), (
            f"{name} gave {sorted(set(map(len, tokens)))} tokens, not {new}"
        )
    seconds = common.in_turns(made, repeats, warm=0)
    count = {name: sum(map(len, tokens)) for name, tokens in texts.items()}
    alone, assisted = texts["transformers generate"], seconds["transformers assisted"]
    return {
        name: {
            "tokens_per_second": count[name] / float(np.median(times)),
            "against_assisted": float(np.median(assisted / times)),
            "texts_as_transformers_alone": sum(a == b for a, b in zip(texts[name], alone, strict=True))
            if greedy
            else None,
            "tokens": count[name],
            "seconds": times.tolist(),
        }
        for name, times in seconds.items()
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stories", type=Path, required=True, help="held-out stories")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    torch.manual_seed(0)
    root = Path(assets.__file__).parent
    theirs, small = (Transformers(root / name) for name in (assets.TARGET, assets.DRAFT))
    assistant = small.assisting(CHAIN)
    target = mj.load(assets.TARGET, dtype="float32")
    drafter = mj.drafters.load(f"model:{assets.DRAFT}", target, num_draft_tokens=CHAIN, dtype="float32")
    questions = [p.question for p in arithmetic.generate(args.prompts, split="eval")]
    tasks = {
        "stories": story_prompts(target, list(documents(args.stories)), args.prompts),
        "arithmetic": [target.encode(q, chat=True) for q in questions],
    }
    made = common.provenance("torch", "transformers", data=[args.stories], target=target.params)
    report: dict[str, Any] = {
        "command": made["command"],
        "date": made["date"][:10],
        "environment": made | {"torch_threads": torch.get_num_threads()},
        "bar": f"mars({THETA:g}) at batch 1: at least {BAR:g} x the tokens/s of transformers assisted generation",
        "assisted_of_a_batch": refusal(theirs, assistant, tasks["stories"][:2]),
        "cases": [],
    }
    for task, prompts in tasks.items():
        for batch in args.batches:
            for temperature in args.temperatures:
                every = ways(target, drafter, theirs, assistant, prompts, batch, temperature, args.new_tokens)
                found = measure(every, args.repeats, args.new_tokens, greedy=temperature == 0)
                case = {"task": task, "batch": batch, "temperature": temperature, "prompts": len(prompts)}
                report["cases"].append(case | {"ways": found})
                common.write(args.output, report)
                print(f"{task}, batch {batch}, temperature {temperature:g}")
                for name, row in found.items():
                    rate, against = row["tokens_per_second"], row["against_assisted"]
                    count = row["texts_as_transformers_alone"]
                    same = "" if count is None else f"{count}/{len(prompts)} texts of generate"
                    print(f"  {name:28} {rate:8.1f} tokens/s {against:6.2f} x assisted  {same}", flush=True)


if __name__ == "__main__":
    main()
