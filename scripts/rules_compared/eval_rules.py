"""Measure all rules on the embedded family, each with several values of its setting.

    python -m scripts.rules_compared.eval_rules decode --stories heldout.txt.xz --rows rows.jsonl
    python -m scripts.rules_compared.eval_rules decode ... --learned FOLDER   # the head of eval_indicator.py --save
    python -m scripts.rules_compared.eval_rules report --rows rows.jsonl --output scripts/results/eval_rules.json
    python -m scripts.rules_compared.rules_pictures

The tasks are stories (likelihood under the target) and arithmetic (exact match), at temperatures 0 and 1, with a chain
of 5 and a dynamic tree of 12 nodes from the embedded draft model. All arms decode the same prompts with the same seeds,
so that differences are paired. `decode` takes 40 minutes on one core. For every prompt of an arm, it appends a line to
the file of rows. If `decode` is killed, run the same command again to continue. At temperature 0, `nucleus` and the
distribution rules are equivalent to `exact`, so they run only at temperature 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mars_jax as mj
from mars_jax.lab.evaluate import scoring
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.benchmark.arms import low_margin_sampling
from mars_jax.lab.evaluate.tasks.catalogue import read_problems
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.serve import likelihood
from mars_jax.serve.requests import Completion, make_requests
from mars_jax.serve.session import Session
from mars_jax.serve.text import ends_in_loop
from scripts import common
from scripts.rules_compared.rules_report import key_of, report

CHAIN, TREE = 5, mj.drafters.Dynamic(top_k=3, depth=5, nodes=12)
# With these limits, all prompts of a task share one width of the token buffer, so each rule compiles once per task.
NEW_TOKENS = {"stories": 104, "arithmetic": 96}
BATCH = 32
TASKS = ("stories", "arithmetic")
# Number of prompts per arm. The rules of the paired comparison use `MOST` prompts, the other rules `MANY`.
MOST, MANY = 64, 32
RATIOS, GAPS = (0.95, 0.9, 0.85, 0.8, 0.7), (0.5, 1.0, 1.5, 2.25, 3.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A rule with its settings, or a control."""

    family: str  # name of the rule's curve, or of the control
    name: str  # unique
    settings: Mapping[str, Any]
    draft: str  # none, chain or tree
    sampled: bool = False  # draft tokens are drawn from q
    top_k: int = 0
    prompts: int = MANY
    spec: str = "exact"
    base: str = ""  # family of the strict rule that it relaxes


def swept(
    spec: str, draft: str, values: Sequence[Mapping[str, Any]], *, family: str = "", **options: Any
) -> list[Arm]:
    """Return one arm of a rule for each dict of settings in `values`."""
    family = family or spec

    def words(settings: Mapping[str, Any]) -> str:
        fixed = ("base", "margin", "trust", "window", "k", "block")
        return ", ".join(f"{name} {value:g}" for name, value in settings.items() if name not in fixed)

    return [
        Arm(family=family, name=f"{family} {words(v)}".strip(), settings=v, draft=draft, spec=spec, **options)
        for v in values
    ]


def grid(name: str, values: Sequence[float], **fixed: Any) -> list[dict[str, Any]]:
    """Return a dict of settings for each value of the setting `name`. Every dict includes `fixed`."""
    return [{**fixed, name: value} for value in values]


def margins(draft: str) -> list[Arm]:
    """Return arms of `exact`, and of `mars` based on `exact`, with both kinds of margin."""
    chain = draft == "chain"
    options = {"prompts": MOST if chain else MANY, "base": "exact"}
    swept_values = slice(None) if chain else slice(1, 4, 2)
    return [
        *swept("exact", draft, [{}], **options),
        *swept("mars", draft, grid("theta", RATIOS[swept_values]), family="mars (ratio)", **options),
        *swept(
            "mars", draft, grid("theta", GAPS[swept_values], margin="gap"), family="mars (gap)", **options
        ),
    ]


def edges(draft: str) -> list[Arm]:
    """Return arms of relaxed rules other than `mars`, based on `exact`; for trees, three with one setting each."""
    options = {"prompts": MANY, "base": "exact"}
    if draft == "tree":
        return [
            *swept("topk", draft, grid("delta", (1.2,)), **options),
            *swept("adaptive", draft, grid("theta", (0.3,)), **options),
            *swept("budget", draft, grid("gap", (0.25,)), **options),
        ]
    pairs = [(0.09, 0.3), (0.03, 0.1)]
    return [
        *swept("adaptive", draft, grid("theta", (0.5, 0.3, 0.1)), **options),
        *swept("topk", draft, grid("delta", (0.6, 1.2, 2.5)), **options),
        *swept("budget", draft, grid("gap", (0.1, 0.25, 0.5)), **options),
        *swept("typical", draft, [{"epsilon": e, "delta": d} for e, d in pairs], **options),
        *swept("entropy_gate", draft, grid("entropy", (1.5, 1.0)), **options),
        *swept("fly", draft, grid("entropy", (0.9, 0.3), window=2), **options),
        *swept("learned", draft, grid("theta", (0.01, 0.05, 0.2, 0.9)), **options),
    ]


def distributions(draft: str) -> list[Arm]:
    """Return arms of `rejection` and of the rules based on it, for temperature 1."""
    options: dict[str, Any] = {"prompts": MANY, "sampled": True, "base": "rejection"}
    strict = swept("rejection", draft, [{}], **options)
    mars = functools.partial(swept, "mars", draft, family="mars over rejection", **options)
    if draft == "tree":
        return [
            *strict,
            *swept("mixture", draft, grid("weight", (0.5,)), **options),
            *mars(grid("theta", (0.9,), base="rejection")),
            *swept("lenience", draft, grid("factor", (0.5,)), **options),
        ]
    cascade = functools.partial(swept, "speccascade", draft, **options)
    return [
        *strict,
        *swept("rejection", draft, [{"block": True}], family="block", **options),
        *mars(grid("theta", (0.95, 0.9, 0.8), base="rejection")),
        *swept("mixture", draft, grid("weight", (0.8, 0.5, 0.2)), **options),
        # The head learned to give the target nearly all the weight; a shift below 0 gives the draft more weight.
        *swept("diversed", draft, grid("shift", (0.0, -4.0, -6.0)), **options),
        *swept("lenience", draft, grid("factor", (0.7, 0.5, 0.3)), **options),
        *swept("nucleus", draft, grid("mass", (0.5, 0.8, 0.9)), **options),
        *swept("cactus", draft, grid("divergence", (0.1, 1.0)), **options),
        *cascade(grid("alpha", (0.1, 0.5)), family="speccascade (token_v3)"),
        *cascade(grid("alpha", (0.1, 1.0), trust="opt"), family="speccascade (opt)"),
        *swept("mentored", draft, grid("bound", (0.05, 0.2, 0.5)), **options),
        *swept("fuzzy", draft, grid("bound", (0.05, 0.1, 0.2)), **options),
        *swept("released", draft, grid("ratio", (0.9, 0.8)), **options),
    ]


def controls(temperature: float) -> list[Arm]:
    """Return arms without a draft. The target chooses from all tokens, or from those that a relaxed rule allows."""
    target = Arm(family="target alone", name="target alone", settings={}, draft="none", prompts=MOST)
    two_best = dataclasses.replace(
        target, family="top_k=2", name="target alone, top_k 2", top_k=2, prompts=MANY
    )
    low_margin = dataclasses.replace(
        target, family="low margin", name="target alone, of its two best where z2/z1 > 0.9",
        settings={"theta": 0.9}, prompts=MANY, spec="low margin",
    )  # fmt: skip
    return [target, two_best, low_margin] if temperature > 0 else [target, low_margin]


def arms(temperature: float, draft: str) -> list[Arm]:
    """Return all arms for a temperature and a kind of draft: none, chain or tree."""
    if draft == "none":
        return controls(temperature)
    return [*margins(draft), *edges(draft), *(distributions(draft) if temperature > 0 else [])]


def passes(drafts: Sequence[str]) -> Iterator[tuple[str, float, str, list[Arm]]]:
    """Yield (task, temperature, draft, arms), most important first, in case the sweep ends early."""
    for draft in drafts:
        parts = (margins, edges, distributions) if draft != "none" else (None,)
        for part in parts:
            for temperature, task in itertools.product((0.0, 1.0), TASKS):
                part_arms = controls(temperature) if part is None else part(draft)
                if part is not distributions or temperature > 0:
                    yield task, temperature, draft, part_arms


class Pair:
    """The models, and one session for each kind of draft."""

    def __init__(self, learned: Path | None) -> None:
        self.learned = learned
        self.target = mj.load("tiny/target", dtype="float32")
        self.draft = mj.load("tiny/draft", dtype="float32")
        self._sessions: dict[tuple[str, bool], Session] = {}

    def session(self, draft: str, sampled: bool) -> Session:
        """Return the session for a kind of draft. Each session is created once, so its compiled programs are reused."""
        if (draft, sampled) not in self._sessions:
            spec = "none"
            options: dict[str, Any] = {}
            if draft != "none":
                shape = {"tree": TREE} if draft == "tree" else {"num_draft_tokens": CHAIN}
                spec, options = "model:tiny/draft", {"sample": sampled, "dtype": "float32"} | shape
            drafter = mj.drafters.load(spec, self.target, **options)
            self._sessions[draft, sampled] = Session(
                target=self.target, drafter=drafter, batch_size=BATCH, log_probs=True
            )
        return self._sessions[draft, sampled]

    def rule(self, arm: Arm) -> mj.verify.LoadedRule:
        if arm.spec == "low margin":
            return mj.verify.LoadedRule(low_margin_sampling(**arm.settings))
        heads = {"learned": f"learned:{self.learned}", "diversed": "diversed:tiny/diversed"}
        spec = heads.get(arm.spec, arm.spec)
        return mj.verify.load(spec, self.target, **arm.settings)


def row_of(pair: Pair, problem: Problem, completion: Completion, log_q: np.ndarray | None) -> dict[str, Any]:
    """Return the metrics and the score of one answer."""
    metrics, log_probs = completion.metrics, completion.log_probs
    assert log_probs is not None
    log_p = np.asarray(log_probs.log_prob)
    accepted = np.asarray([kind != "corrected" for kind in log_probs.kind])
    if problem.metric == "likelihood":
        score: list[float] | None = [float(log_p.sum()), float(len(log_p))]
    else:
        score = scoring.score_answer(problem, completion.text)
    overshoot = [0.0, 0] if log_q is None else [float((log_q - log_p)[accepted].sum()), int(accepted.sum())]
    return {
        "steps": metrics.steps,
        "emitted": metrics.emitted,
        "accepted": metrics.accepted,
        "relaxed": metrics.accepted_relaxed,
        "regret": round(metrics.regret, 4),
        "loops": bool(ends_in_loop(completion.tokens, pair.target.stop_tokens)),
        "cut": completion.finish_reason != "stop",
        "score": score,
        "overshoot": overshoot,
    }


def decode_batch(
    pair: Pair, arm: Arm, task: str, temperature: float, group: list[tuple[int, Problem]]
) -> list[dict]:
    """Decode up to `BATCH` prompts and return their rows."""
    prompts = [prompt_tokens(pair.target, problem, chat=task == "arithmetic") for _, problem in group]
    requests = make_requests(
        pair.target, prompts, temperature=temperature, top_k=arm.top_k,
        seed=[number for number, _ in group], max_new_tokens=NEW_TOKENS[task],
    )  # fmt: skip
    completions = pair.session(arm.draft, arm.sampled).using(pair.rule(arm)).decode(requests).completions
    log_q: list[np.ndarray | None] = [None] * len(completions)
    if arm.draft != "none":
        texts = [[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)]
        scored = likelihood.score(pair.draft, texts, rows=BATCH)
        log_q = [s.log_p[len(p) - 1 :] for s, p in zip(scored, prompts, strict=True)]
    key = {"task": task, "temperature": temperature, "draft": arm.draft, "arm": arm.name}
    return [
        {**key, "id": number, **row_of(pair, problem, completion, q)}
        for (number, problem), completion, q in zip(group, completions, log_q, strict=True)
    ]


def decode(stories: Path, file: Path, scale: float, drafts: Sequence[str], learned: Path | None) -> None:
    """Append all missing rows. The arms of the rule `learned` are skipped unless the folder of its head is given."""
    have = {(*key_of(row), row["id"]) for row in read_rows(file)}
    pair = Pair(learned)
    problems = {
        "stories": read_problems("stories", str(stories), chat=False, limit=MOST),
        "arithmetic": read_problems("arithmetic", chat=True, limit=MOST),
    }
    if file.exists():  # remove an incomplete last line, so that new rows begin on a new line
        content = file.read_bytes()
        file.write_bytes(content[: content.rfind(b"\n") + 1])
    with file.open("a", encoding="utf-8") as out:
        for task, temperature, draft, part_arms in passes(drafts):
            for arm in part_arms:
                if arm.spec == "learned" and learned is None:
                    continue
                count = max(1, round(scale * arm.prompts))
                began, fresh = time.perf_counter(), 0
                numbered = list(enumerate(problems[task][:count]))
                for first in range(0, count, BATCH):
                    group = numbered[first : first + BATCH]
                    if all((task, temperature, draft, arm.name, number) in have for number, _ in group):
                        continue
                    for row in decode_batch(pair, arm, task, temperature, group):
                        if (task, temperature, draft, arm.name, row["id"]) not in have:
                            out.write(json.dumps(row) + "\n")
                            fresh += 1
                    out.flush()
                seconds = time.perf_counter() - began
                print(f"{task} {temperature:g} {draft} {arm.name}: {fresh} rows, {seconds:.1f} s", flush=True)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, skipping lines that are not JSON, such as an incomplete last line after a kill."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("part", choices=("decode", "report"))
    parser.add_argument(
        "--rows", type=Path, required=True, help="the file of rows; decode continues an existing one"
    )
    parser.add_argument("--stories", type=Path, help="decode: file of held-out stories")
    parser.add_argument("--output", type=Path, help="report: the JSON file to write")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the numbers of prompts, for a trial run"
    )
    parser.add_argument("--learned", type=Path, help="decode: a head for the rule `learned`")
    parser.add_argument("--drafts", nargs="*", default=("none", "chain", "tree"))
    args = parser.parse_args()
    if args.part == "decode":
        if args.stories is None:
            parser.error("decode needs --stories, a file of held-out stories")
        decode(args.stories, args.rows, args.scale, args.drafts, args.learned)
        return
    if args.output is None:
        parser.error("report needs --output, the JSON to write")
    by_draft = {draft: {t: arms(t, draft) for t in (0.0, 1.0)} for draft in args.drafts}
    tables = report(read_rows(args.rows), by_draft)
    environment = common.provenance()
    common.write(args.output, tables | {"date": environment["date"][:10], "environment": environment})


if __name__ == "__main__":
    main()
