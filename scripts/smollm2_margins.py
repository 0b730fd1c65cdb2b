"""Log what a chain would meet at every place of SmolLM2's own texts, and replay any theta, margin and length from that.

    python scripts/smollm2_margins.py log --data SHARED/data/eval --output scripts/results/smollm2_margins.npz
    python scripts/smollm2_margins.py replay --log scripts/results/smollm2_margins.npz \
        --output scripts/results/smollm2_replay.json

The log takes one step for each token, drafts `DEPTH` tokens there and accepts none, so that the text is the target's
own. Of each drafted token it keeps whether `exact` takes it, whether it is one of the target's two best, whether a stop
token forbids to relax it, and the two best logits at the place before it. A step of any rule `mars` with any chain to
`DEPTH` is a function of that. A replay walks the logged text: after a relaxed token it goes on with the target's own
text, where a decode goes on with another one. That is all it does not know; for `exact` it is equal to a decode.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax.numpy as jnp
import numpy as np
from common import ratio_of_sums
from jax import Array

import mars_jax as mj
from mars_jax import drafters
from mars_jax.core import decode, struct
from mars_jax.core.controls import is_stop
from mars_jax.core.evidence import Evidence
from mars_jax.core.rule import LoadedRule
from mars_jax.core.types import NO_TOKEN, Verdict
from mars_jax.lab.evaluate.benchmark.margins import margin_of
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from mars_jax.verify.exact import named

TASKS = ("mt_bench", "alpaca", "gsm8k_test", "humaneval", "cnn_dm", "wmt19")
TEMPERATURES = (0.0, 1.0)
HEAD = "eagle:smollm2/eagle3"
DEPTH = 12
"""The longest chain that can be replayed."""
LENGTHS = tuple(range(3, DEPTH + 1))
THETAS = tuple(round(0.70 + 0.02 * i, 2) for i in range(15))
GAPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Nats; the ratio's 0.9 is a gap of a tenth of the best logit, which is about 2.5 here."""
GRIDS = {"ratio": THETAS, "gap": GAPS}
EXACT, SECOND, BARRED = 1, 2, 4
"""Bits of a drafted token: `exact` takes it; it is one of the two best; a stop token forbids to relax it."""


@struct.dataclass(kw_only=True)
class Met(Verdict):
    """A verdict of no token, and what every drafted token would have met; D of them."""

    bits: Array  # u8[B, D]
    z1: Array  # f32[B, D]; raw logits of the two best tokens where it was drafted
    z2: Array  # f32[B, D]


@struct.dataclass
class Log:
    """A rule for chains that accepts nothing, emits what `exact` would, and tells what it saw."""

    def __call__(self, evidence: Evidence) -> tuple[Met, Log]:
        tree, stats, stops = evidence.tree, evidence.stats, evidence.controls.stop_tokens
        y, child = named(evidence), tree.tokens[:, 1:]
        id1, id2 = stats.id1[:, :-1], stats.id2[:, :-1]
        exact = child == y[:, :-1]
        second = (child == id1) | (child == id2)
        barred = is_stop(child, stops) | is_stop(id1, stops) | is_stop(y[:, :-1], stops)
        none = jnp.uint8(0)
        bits = jnp.where(exact, jnp.uint8(EXACT), none) | jnp.where(second, jnp.uint8(SECOND), none)
        bits |= jnp.where(barred, jnp.uint8(BARRED), none)
        batch, depth = child.shape
        met = Met(
            path=jnp.zeros((batch, depth + 1), jnp.int32),
            num_accepted=jnp.zeros((batch,), jnp.int32),
            next_token=y[:, 0],
            relaxed=jnp.zeros((batch, depth), bool),
            bits=jnp.where(child == NO_TOKEN, none, bits),
            z1=stats.top1[:, :-1],
            z2=stats.top2[:, :-1],
        )
        return met, self


def prompts(target: mj.Pretrained, path: Path, count: int, longest: int) -> list[tuple[int, list[int]]]:
    """The first turns of a file as chats, those of at most `longest` tokens, with their places in the file."""
    with lzma.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["question"] if "question" in row else row["turns"][0] for row in rows]
    encoded = ((place, target.encode(text, chat=True)) for place, text in enumerate(texts))
    return [(place, ids) for place, ids in encoded if len(ids) <= longest][:count]


def log(
    session: Session, given: Sequence[Sequence[int]], *, temperature: float, new: int
) -> dict[str, np.ndarray]:
    """What chains of the drafter's length meet at every place of the texts that the target writes.

    Args:
      session: the pair; its drafter drafts chains.
      given: prompts as tokens; prompt i draws with seed i.
      temperature, new: of the texts.

    Returns:
      `bits` u8[n, D], `z1` and `z2` f32[n, D] of the n places of all texts one after another, `text` i32[n]: whose
      place it is, and `tokens` i32[n], the target's own.
    """
    requests = make_requests(
        session.target, given, temperature=temperature, seed=list(range(len(given))), max_new_tokens=new
    )
    logging = session.using(LoadedRule(Log()))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("bits", "z1", "z2", "text", "tokens")}
    done = 0
    for batch in logging.batches(requests):
        decoder, params, state = batch.session.prepare(batch.requests)
        steps = []
        for _, info in decode.stream(decoder, params, state):
            seen: Any = info.verdict  # a Met
            steps.append(
                [np.asarray(x) for x in (info.num_emitted, seen.bits, seen.z1, seen.z2, info.emitted[:, 0])]
            )
        live, bits, z1, z2, tokens = (
            np.stack(column, axis=1) for column in zip(*steps, strict=True)
        )  # [B, steps]
        for row in range(len(batch.requests)):
            here = live[row] > 0
            parts["text"].append(np.full(here.sum(), done + row, np.int32))
            for name, column in (("bits", bits), ("z1", z1), ("z2", z2), ("tokens", tokens)):
                parts[name].append(column[row][here])
        done += len(batch.requests)
    return {name: np.concatenate(column) for name, column in parts.items()}


def accepted(logged: dict[str, np.ndarray], theta: float, margin: str = "ratio") -> np.ndarray:
    """i32[n]: how many tokens of the whole chain `mars` accepts at every place; theta = inf is `exact`."""
    bits = logged["bits"]
    take = (bits & EXACT) > 0
    if np.isfinite(theta):
        value = margin_of(margin, logged["z1"].astype(np.float64), logged["z2"].astype(np.float64))
        low = value < theta if margin == "gap" else value > theta
        take |= low & ((bits & SECOND) > 0) & ((bits & BARRED) == 0)
    return np.cumprod(take, axis=1).sum(axis=1)


def steps_of(logged: dict[str, np.ndarray], taken: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(places where steps begin i32[s], (steps, tokens) of every text i32[texts, 2]) with a chain of `length`."""
    taken = np.minimum(taken, length)
    begins, counts = [], []
    edges = np.flatnonzero(np.diff(logged["text"], prepend=-1))
    for first, last in zip(edges, [*edges[1:], len(taken)], strict=True):
        place, steps = int(first), 0
        while place < last:
            begins.append(place)
            steps += 1
            place += int(taken[place]) + 1
        counts.append((steps, last - first))
    return np.asarray(begins, np.int64), np.asarray(counts, np.int64)


def rejections(logged: dict[str, np.ndarray], length: int) -> dict[str, Any]:
    """Where the strict rule stopped a chain: the share of these places with a ratio above 0.9, and what was refused."""
    taken = accepted(logged, np.inf)
    begins, _ = steps_of(logged, taken, length)
    stopped = begins[taken[begins] < length]
    depth = taken[stopped]
    ratio = margin_of("ratio", logged["z1"][stopped, depth], logged["z2"][stopped, depth])
    bits, text = logged["bits"][stopped, depth], logged["text"][stopped]
    low = ratio > 0.9
    count = int(logged["text"].max()) + 1

    def per_text(weights: np.ndarray) -> np.ndarray:
        return np.bincount(text, weights=weights, minlength=count)

    one = np.ones(len(stopped))
    saved = low & ((bits & SECOND) > 0) & ((bits & BARRED) == 0)
    return {
        "rejections": len(stopped),
        "share_above_0.9": ratio_of_sums(per_text(low), per_text(one)),
        "share_that_mars_takes": ratio_of_sums(per_text(saved), per_text(one)),
        "median_z1": float(np.median(logged["z1"][:, 0])),
        "places_above_0.9": float(np.mean(margin_of("ratio", logged["z1"][:, 0], logged["z2"][:, 0]) > 0.9)),
    }


def replay(logged: dict[str, np.ndarray], lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """tau of every threshold and length, [tau, low, high] over prompts; `inf` is `exact`."""
    found: dict[str, Any] = {}
    for margin, thetas in GRIDS.items():
        for theta in (*thetas, np.inf):
            taken = accepted(logged, theta, margin)
            cells = {}
            for length in lengths:
                _, counts = steps_of(logged, taken, length)
                cells[str(length)] = ratio_of_sums(counts[:, 1], counts[:, 0])
            found.setdefault(margin, {})[f"{theta:g}"] = cells
    return found


def together(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Logs of several tasks as one."""
    first, texts = 0, []
    for part in parts:
        texts.append(part["text"] + first)
        first += int(part["text"].max()) + 1
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "text"}
    return joined | {"text": np.concatenate(texts)}


def read(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """A log, by `task, T=...`."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for name in file.files:
            case, _, field = name.rpartition("/")
            found.setdefault(case, {})[field] = file[name]
    return found


def write(path: Path, logs: dict[str, dict[str, np.ndarray]]) -> None:
    """A log; logits as float16, whose step of 0.016 at 25 moves a ratio by less than 0.001."""
    path.parent.mkdir(parents=True, exist_ok=True)
    narrow = {"z1": np.float16, "z2": np.float16, "text": np.int16}
    fields = {
        f"{case}/{name}": values.astype(narrow.get(name, values.dtype))
        for case, logged in logs.items()
        for name, values in logged.items()
    }
    np.savez_compressed(path, **fields)  # pyright: ignore[reportArgumentType]


def _log(args: argparse.Namespace) -> None:
    target = mj.load(args.target, dtype="float32")
    drafter = drafters.load(args.draft, target, num_draft_tokens=DEPTH)
    session = Session(target=target, drafter=drafter, batch_size=args.prompts)
    logs = read(args.output) if args.output.exists() else {}
    for task in args.tasks:
        chosen = prompts(target, args.data / f"{task}.jsonl.xz", args.prompts, args.longest)
        for temperature in TEMPERATURES:
            case = f"{task}, T={temperature:g}"
            if case in logs:
                continue
            logs[case] = log(
                session, [ids for _, ids in chosen], temperature=temperature, new=args.new_tokens
            )
            write(args.output, logs)
            figure = rejections(logs[case], 7)
            print(f"{case}: {len(chosen)} prompts, {len(logs[case]['text'])} places, {figure}", flush=True)


def _replay(args: argparse.Namespace) -> None:
    logs = read(args.log)
    cases = dict(logs)
    for temperature in TEMPERATURES:
        parts = [logged for case, logged in logs.items() if case.endswith(f"T={temperature:g}")]
        if parts:
            cases[f"all, T={temperature:g}"] = together(parts)
    report = {
        "environment": common.provenance(),
        "cases": {
            case: {
                "prompts": int(logged["text"].max()) + 1,
                "places": len(logged["text"]),
                "rejected": {str(length): rejections(logged, length) for length in (3, 7)},
                # Of single tasks the lengths that are decoded as well; the whole sweep of all together.
                "tau": replay(logged, LENGTHS if case.startswith("all") else (3,)),
            }
            for case, logged in cases.items()
        },
    }
    common.write(args.output, report, indent=None)
    for case, found in report["cases"].items():
        print(case, found["rejected"]["7"], {t: found["tau"]["ratio"][t]["3"] for t in ("inf", "0.9")})


def main() -> None:
    parser = common.parser(__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("log", help="decode, and write the log")
    made.set_defaults(run=_log)
    made.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz and the others")
    made.add_argument("--target", default="smollm2")
    made.add_argument("--draft", default=HEAD)
    made.add_argument("--tasks", nargs="+", default=TASKS)
    made.add_argument("--prompts", type=int, default=8, help="of a task; they decode side by side")
    made.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    made.add_argument("--new-tokens", type=int, default=48)
    made.add_argument("--output", type=Path, required=True, help="cases that it has already are kept")
    made = commands.add_parser("replay", help="read the log, and write what any theta and length would give")
    made.set_defaults(run=_replay)
    made.add_argument("--log", type=Path, required=True)
    made.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
