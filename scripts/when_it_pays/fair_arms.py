"""Compare lossy rules with the best lossless one, each at its own best draft length, in one study of `STUDIES`.

    python -m scripts.when_it_pays.fair_arms costs --study model --output costs.json   # while nothing else runs
    python -m scripts.when_it_pays.fair_arms decode --study model --data DATA --costs costs.json --rows rows.jsonl
    python -m scripts.when_it_pays.fair_arms check --study model --data DATA --costs costs.json --rows rows.jsonl \\
        --output check.json
    python -m scripts.when_it_pays.fair_arms report --study model --costs costs.json --check check.json \\
        --rows scripts/results/fair_arms.jsonl.xz --output scripts/results/fair_arms.json

A study decodes with drafted chains of several lengths, at temperatures 0 and 1. For each arm, the draft length that is
fastest on one set of prompts is chosen, and the arm is then measured at this length on other prompts. The speed
relative to plain decoding is computed as tau divided by the cost of a step in plain steps, for two devices: this CPU,
as timed by `costs` at batch 1, and a memory-bound accelerator. On the accelerator, a step that drafts K tokens is
assumed to cost as much as 1 + 0.05 K plain steps if the draft is as small as an EAGLE head, or 1 + 0.01 K plain steps
with n-grams.
`check` compares these estimates with measured times. The comparison follows arXiv 2607.08690, which finds that tuning
the draft length often gains as much as relaxing the rule. If `decode` is killed, run it again with the same arguments
to continue.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from sacrebleu import sentence_chrf

import mars_jax as mj
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.tasks.catalogue import read_problems
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.serve import likelihood
from mars_jax.serve.session import Session
from scripts import common
from scripts.rules_compared import eval_rules
from scripts.rules_compared.eval_rules import BATCH, Arm, row_of, swept
from scripts.rules_compared.rules_report import Rows, Sums, key_of, score_of, spread, sums, tau_of, weights

CHEAP = {"chain": 0.05, "ngram": 0.01}
"""Cost of a drafted token on a memory-bound accelerator, in units of a plain step: for a draft as small as an EAGLE
head, and, as an upper bound, for n-grams, whose tokens are looked up and only have to be verified."""
TURNS = 7
LONGEST = 800
"""Prompts for SmolLM2 with fewer characters than this, about 200 tokens, count as short."""
TIMED = (("exact", 0.0), ("mars theta 0.9", 0.0), ("rejection", 1.0))
"""Arms that `check` decodes, on the `clocked` task of a study."""
LOSSLESS = ("exact", "rejection")
Problems = Sequence[Problem]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts of a task. Draft lengths are chosen on the first prompts, and the others are scored."""

    read: Callable[[Path], Problems]  # reads the prompts from the data folder
    choose: int
    score: int
    new_tokens: int
    chat: bool = True

    @property
    def scored(self) -> range:
        """Positions of the scored prompts."""
        return range(self.choose, self.choose + self.score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A target, a draft, and the tasks that they decode."""

    target: str
    draft: str
    lengths: tuple[int, ...]
    tasks: Mapping[str, Task]
    clocked: str
    rows: int = BATCH  # decoded in one batch
    ngram: tuple[int, ...] = ()  # draft lengths of an additional lossless arm, which drafts n-grams
    extra_rules: bool = False  # whether to measure further rules, for comparison

    def lengths_of(self, arm: Arm) -> tuple[int, ...]:
        return self.ngram if arm.draft == "ngram" else self.lengths


def _stories(data: Path) -> Problems:
    return read_problems("stories", str(data / "tinystories_heldout.txt.xz"), chat=False, limit=276)


def _jsonl(data: Path, name: str) -> Problems:
    """Return a file's problems, the short ones before the long ones, with each group in a fixed random order."""
    problems = read_problems(name, str(data / "eval" / f"{name}.jsonl.xz"), chat=True)
    parts: tuple[list[Problem], list[Problem]] = [], []
    for problem in problems:
        parts[len(problem.turns[0]) >= LONGEST].append(problem)
    return [part[i] for part in parts for i in np.random.default_rng(0).permutation(len(part))]


def _open(data: Path) -> Problems:
    return [*_jsonl(data, "alpaca")[:16], *_jsonl(data, "mt_bench")]


def _mixed(data: Path) -> Problems:
    """Interleave short problems from three tasks of Spec-Bench. Their answers are scored by likelihood."""
    parts: dict[str, list[Problem]] = {
        f"spec_bench/{name}": [] for name in ("math_reasoning", "qa", "translation")
    }
    for problem in _jsonl(data, "spec_bench"):
        if len(problem.turns[0]) < LONGEST:
            parts.get(problem.task, []).append(problem)
    in_turns = [p for row in zip(*(parts[task] for task in sorted(parts)), strict=False) for p in row]
    return [dataclasses.replace(p, metric="likelihood") for p in in_turns]


def _news(data: Path) -> Problems:
    """Return the 52 shortest articles of CNN/DailyMail, of at most 900 tokens each, in a fixed random order."""
    articles = read_problems("cnn_dm", str(data / "eval" / "cnn_dm.jsonl.xz"), chat=True)
    articles = sorted(articles, key=lambda article: len(article.turns[0]))
    return [articles[i] for i in np.random.default_rng(0).permutation(52)]


EMBEDDED = {
    "arithmetic": Task(
        read=lambda data: read_problems("arithmetic", chat=True, limit=1300),
        choose=300,
        score=1000,
        new_tokens=96,
    ),
    "stories": Task(read=_stories, choose=96, score=180, new_tokens=104, chat=False),
}
ANSWERED = {
    "open": Task(read=_open, choose=16, score=80, new_tokens=96),
    "mixed": Task(read=_mixed, choose=12, score=80, new_tokens=96),
    "translations": Task(read=lambda data: _jsonl(data, "wmt19"), choose=12, score=40, new_tokens=96),
    "news": Task(read=_news, choose=12, score=40, new_tokens=96),
}
STUDIES = {
    "model": Study(
        target="tiny/target", draft="model:tiny/draft", lengths=(2, 3, 5, 8, 12), tasks=EMBEDDED,
        clocked="stories", extra_rules=True,
    ),
    "head": Study(
        target="tiny/target", draft="eagle:tiny/eagle3", lengths=(2, 3, 5, 8, 12), tasks=EMBEDDED,
        clocked="stories",
    ),
    "smollm2": Study(
        target="smollm2", draft="eagle:smollm2/eagle3", lengths=(1, 2, 3), tasks=ANSWERED, clocked="open", rows=16,
        ngram=(1, 3, 6),
    ),
}  # fmt: skip


class Pair:
    """The models of a study, and one session for each kind and length of draft."""

    def __init__(self, study: Study, rows: int) -> None:
        self.study, self.rows = study, rows
        self.target = mj.load(study.target, dtype="float32")
        model = study.draft.removeprefix("model:")
        self.draft = mj.load(model, dtype="float32") if study.draft.startswith("model:") else None
        self._sessions: dict[tuple[str, bool], Session] = {}

    def session(self, draft: str, sampled: bool = False) -> Session:
        """Return the session for a kind and length of draft, or for "none". Sessions reuse their compiled programs."""
        if (draft, sampled) not in self._sessions:
            kind, _, length = draft.partition(" ")
            options: dict[str, Any] = {"num_draft_tokens": int(length)} if length else {}
            if kind == "chain":
                options |= {"sample": sampled, "dtype": "float32"}
            drafter = mj.drafters.load(self.study.draft if kind == "chain" else kind, self.target, **options)
            self._sessions[draft, sampled] = Session(
                target=self.target, drafter=drafter, batch_size=self.rows, log_probs=self.rows > 1
            )
        return self._sessions[draft, sampled]

    def using(self, arm: Arm) -> Session:
        rule = mj.verify.load(arm.spec, self.target, **arm.settings)
        return self.session(arm.draft, arm.sampled).using(rule)

    def prompts(self, task: str, problems: Iterable[Problem]) -> list[list[int]]:
        return [prompt_tokens(self.target, p, chat=self.study.tasks[task].chat) for p in problems]

    def rows_of(
        self, arm: Arm, task: str, temperature: float, group: Sequence[tuple[int, Problem]]
    ) -> list[dict[str, Any]]:
        """Decode some prompts and return their rows."""
        prompts = self.prompts(task, (problem for _, problem in group))
        requests = mj.make_requests(
            self.target,
            prompts,
            temperature=temperature,
            seed=[number for number, _ in group],
            max_new_tokens=self.study.tasks[task].new_tokens,
        )
        completions = self.using(arm).decode(requests).completions
        log_q: list[np.ndarray | None] = [None] * len(completions)
        if self.draft is not None:
            texts = [[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)]
            scored = likelihood.score(self.draft, texts, rows=BATCH)
            log_q = [s.log_p[len(p) - 1 :] for s, p in zip(scored, prompts, strict=True)]
        key = {"task": task, "temperature": temperature, "draft": arm.draft, "arm": arm.name}
        rows = []
        for (number, problem), completion, q in zip(group, completions, log_q, strict=True):
            row = {**key, "id": number, **row_of(cast(Any, self), problem, completion, q)}
            if problem.metric == "bleu":  # BLEU is defined for a corpus, so score single answers with chrF
                row["score"] = [sentence_chrf(completion.text, problem.references).score / 100]
            rows.append(row)
        return rows


def arms(study: Study, temperature: float) -> list[Arm]:
    """Return the arms, lossless arms first. Their draft lengths are set later, by `sized`."""
    drawn: dict[str, Any] = {"sampled": True}
    exact = swept("exact", "chain", [{}])
    if study.ngram:
        exact += swept("exact", "ngram", [{}], family="exact over n-grams")
    mars = swept("mars", "chain", [{"theta": 0.9}])
    gap = {"theta": 1.0, "margin": "gap"}
    if temperature == 0:
        extra = [
            *swept("mars", "chain", [gap], family="mars (gap)"),
            *swept("typical", "chain", [{"epsilon": 0.09, "delta": 0.3}]),
        ]
        return [
            *exact,
            *mars,
            *swept("topk", "chain", [{"delta": 1.2}]),
            *(extra if study.extra_rules else []),
        ]
    mars_over = functools.partial(swept, "mars", "chain", **drawn)
    extra = [
        *mars_over([gap | {"base": "rejection"}], family="mars (gap) over rejection"),
        *swept("mentored", "chain", [{"bound": 0.05}], **drawn),
        *swept("fuzzy", "chain", [{"bound": 0.1}], **drawn),
        *(
            dataclasses.replace(arm, settings={**arm.settings, "distance": "tv"})
            for arm in swept("fuzzy", "chain", [{"bound": 0.3}], family="fuzzy (tv)", **drawn)
        ),
    ]
    return [
        *exact,
        *swept("rejection", "chain", [{}], **drawn),
        *swept("rejection", "chain", [{"block": True}], family="block", **drawn),
        *mars,
        *mars_over([{"theta": 0.9, "base": "rejection"}], family="mars over rejection"),
        *(extra if study.extra_rules else []),
    ]


def sized(arm: Arm, length: int) -> Arm:
    return dataclasses.replace(arm, draft=f"{arm.draft} {length}")


def step_costs(study: Study, seconds: Mapping[str, Any], arm: Arm) -> dict[str, dict[int, float]]:
    """Return the cost of a step for each draft length, in units of a plain step, by device."""
    kind = "ngram" if arm.draft == "ngram" else "drawn" if arm.sampled else "greedy"
    lengths = study.lengths_of(arm)
    return {
        "this CPU": {n: seconds[f"{kind} {n}"]["over_plain"]["median"] for n in lengths},
        "a cheap draft": {n: 1 + CHEAP[arm.draft] * n for n in lengths},
    }


def best(taus: Mapping[int, float], costs: Mapping[int, float]) -> int:
    return max(taus, key=lambda n: taus[n] / costs[n])


def time_steps(study: Study) -> dict[str, Any]:
    """Time steps of plain decoding and of each draft length, interleaved, at batch 1 after a two-token prompt."""
    pair = Pair(study, 1)
    prompt = pair.target.encode("Once upon a time")[:2]
    runs: dict[str, Any] = {}
    steps: dict[str, int] = {}
    names = ["plain", *(f"{kind} {n}" for n in study.lengths for kind in ("greedy", "drawn"))]
    names += [f"ngram {n}" for n in study.ngram]
    for name in names:
        kind, _, length = name.partition(" ")
        drawn = kind == "drawn"
        draft = {"plain": "none", "ngram": name}.get(kind, f"chain {length}")
        [arm] = swept("rejection" if drawn else "exact", draft, [{}], sampled=drawn)
        requests = mj.make_requests(
            pair.target, [prompt], max_new_tokens=192, ignore_eos=True, temperature=float(drawn)
        )
        session = pair.using(arm)

        def run(name: str = name, session: Session = session, requests: Any = requests) -> None:
            steps[name] = session.decode(requests).metrics.steps

        runs[name] = run
    per_step = {name: times / steps[name] for name, times in common.in_turns(runs, TURNS).items()}
    return {
        name: {"ms": float(np.median(times) * 1e3), "over_plain": common.ratio(times, per_step["plain"])}
        for name, times in per_step.items()
    }


def check(study: Study, data: Path, rows: Rows, costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Time 30 prompts at batch 1, and compare the speedups with those predicted from tau and costs."""
    pair, task = Pair(study, 1), study.tasks[study.clocked]
    prompts = pair.prompts(study.clocked, task.read(data)[-30:])
    comparisons = []
    for choice in choices(study, rows, costs):
        temperature, n = choice["temperature"], choice["best"]["this CPU"]
        if choice["task"] != study.clocked or (choice["arm"], temperature) not in TIMED:
            continue
        arm = sized(choice["kind"], n)
        requests = [
            mj.make_requests(
                pair.target, [prompt], max_new_tokens=task.new_tokens, temperature=temperature, seed=i
            )
            for i, prompt in enumerate(prompts)
        ]
        plain = pair.session("none").using(mj.verify.load("exact", pair.target))
        sessions = {"plain": plain, "arm": pair.using(arm)}
        counts: dict[str, tuple[int, int]] = {}

        def run(name: str, sessions: Any = sessions, requests: Any = requests, counts: Any = counts) -> None:
            metrics = [sessions[name].decode(request).metrics for request in requests]
            counts[name] = sum(m.steps for m in metrics), sum(m.emitted for m in metrics)

        times = common.in_turns({name: functools.partial(run, name) for name in sessions}, TURNS - 2)
        per_token = {name: seconds / counts[name][1] for name, seconds in times.items()}
        tau = counts["arm"][1] / counts["arm"][0]
        row = {
            "temperature": temperature,
            "arm": choice["arm"],
            "length": n,
            "tau": tau,
            "steps": counts["arm"][0],
            "foretold": tau / step_costs(study, costs, choice["kind"])["this CPU"][n],
            "timed": common.ratio(per_token["plain"], per_token["arm"]),
        }
        comparisons.append(row)
        print(row, flush=True)
    return comparisons


def choices(study: Study, rows: Rows, costs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tau at each length, and the best length on each device, for every task, temperature and arm."""
    for (name, task), temperature in itertools.product(study.tasks.items(), (0.0, 1.0)):
        for arm in arms(study, temperature):
            taus = {}
            for n in study.lengths_of(arm):
                arm_sums = sums_of(rows, name, temperature, sized(arm, n), range(task.choose))
                taus[n] = float(tau_of(arm_sums, np.ones((1, task.choose)))[0])
            device_costs = step_costs(study, costs, arm).items()
            yield {
                "task": name,
                "temperature": temperature,
                "arm": arm.name,
                "lossless": arm.spec in LOSSLESS,
                "kind": arm,
                "taus": taus,
                "best": {device: best(taus, by_length) for device, by_length in device_costs},
            }


def sums_of(rows: Rows, task: str, temperature: float, arm: Arm, ids: range) -> Sums:
    key = (task, temperature, arm.draft, arm.name)
    arm_rows = [row for row in rows if key_of(row) == key and row["id"] in ids]
    return sums([{**row, "id": row["id"] - ids.start} for row in arm_rows])


def decode(study: Study, data: Path, file: Path, costs: Mapping[str, Any]) -> None:
    """Append all missing rows: first the rows from which lengths are chosen, then the scored rows."""
    pair = Pair(study, study.rows)
    problems = {name: task.read(data) for name, task in study.tasks.items()}

    def fill(task: str, temperature: float, arm: Arm, ids: range) -> None:
        key = (task, temperature, arm.draft, arm.name)
        have = {row["id"] for row in eval_rules.read_rows(file) if key_of(row) == key}
        missing = [(i, problems[task][i]) for i in ids if i not in have]
        # Sort the prompts by length, because prompts of similar length share a compiled program.
        missing.sort(key=lambda numbered: len(numbered[1].turns[0]))
        for first in range(0, len(missing), study.rows):
            decoded = pair.rows_of(arm, task, temperature, missing[first : first + study.rows])
            with file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(row) + "\n" for row in decoded)
        print(f"{task} {temperature:g} {arm.draft} {arm.name}: {len(missing)} rows", flush=True)

    for temperature in (0.0, 1.0):
        for arm in arms(study, temperature):
            for n in study.lengths_of(arm):
                for name, task in study.tasks.items():
                    fill(name, temperature, sized(arm, n), range(task.choose))
    for choice in list(choices(study, eval_rules.read_rows(file), costs)):
        for n in sorted(set(choice["best"].values())):
            scored = study.tasks[choice["task"]].scored
            fill(choice["task"], choice["temperature"], sized(choice["kind"], n), scored)


def report(study: Study, rows: Rows, costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table for each task, temperature and device, with all arms at their best lengths."""
    tables: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    selected = list(choices(study, rows, costs))
    # `exact` emits the same tokens as plain decoding at any draft length, so use its scores as those of plain decoding.
    exact = {(c["task"], c["temperature"]): c for c in selected if c["arm"] == "exact"}
    for choice in selected:
        for device, n in choice["best"].items():
            task, temperature, arm = choice["task"], choice["temperature"], choice["kind"]
            ids = study.tasks[task].scored
            w = weights(len(ids))
            arm_sums = sums_of(rows, task, temperature, sized(arm, n), ids)
            reference = exact[task, temperature]
            plain = sums_of(rows, task, temperature, sized(reference["kind"], reference["best"][device]), ids)
            tau, score = tau_of(arm_sums, w), score_of(arm_sums, w)
            speed = tau / step_costs(study, costs, arm)[device][n]
            tables.setdefault((task, temperature, device), []).append(
                {
                    "arm": choice["arm"],
                    "lossless": choice["lossless"],
                    "length": n,
                    "tau": spread(tau),
                    "speed": spread(speed),
                    "score": spread(score),
                    "less_plain": spread(score - score_of(plain, w)),
                    "relaxed_share": float(arm_sums.relaxed.sum() / max(arm_sums.accepted.sum(), 1)),
                    "loops": float(arm_sums.loops.mean()),
                    "_speed": speed,
                }
            )
    summaries = []
    for (task, temperature, device), table in tables.items():
        lossless = max((arm for arm in table if arm["lossless"]), key=lambda arm: arm["speed"][0])
        for arm in table:
            arm["over_best_lossless"] = spread(arm["_speed"] / lossless["_speed"])
        summaries.append(
            {
                "task": task,
                "temperature": temperature,
                "where": device,
                "best_lossless": lossless["arm"],
                "arms": [{k: v for k, v in arm.items() if k != "_speed"} for arm in table],
            }
        )
    return summaries


def packed_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl.xz file."""
    return [json.loads(line) for line in lzma.decompress(file.read_bytes()).decode().splitlines()]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("part", choices=("costs", "decode", "check", "report"))
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument("--rows", type=Path, help="decode appends to it; report reads a .jsonl.xz")
    parser.add_argument("--data", type=Path, help="decode, check: folder of held-out stories and eval/")
    parser.add_argument("--costs", type=Path, help="the JSON file that costs wrote")
    parser.add_argument("--check", type=Path, help="the JSON file that check wrote, if there is one")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    study = STUDIES[args.study]
    environment = common.provenance() | {"study": args.study}
    if args.part == "costs":
        common.write(args.output, environment | {"steps": time_steps(study)})
        return
    costs = json.loads(args.costs.read_text(encoding="utf-8"))
    if args.part == "decode":
        decode(study, args.data, args.rows, costs["steps"])
        return
    if args.part == "check":
        checked = check(study, args.data, eval_rules.read_rows(args.rows), costs["steps"])
        common.write(args.output, environment | {"turns": TURNS - 2, study.clocked: checked})
        return
    rows = packed_rows(args.rows)
    best_lengths = choices(study, rows, costs["steps"])
    tables = {
        "costs": costs,
        "check": None if args.check is None else json.loads(args.check.read_text(encoding="utf-8")),
        "taus": [{k: v for k, v in choice.items() if k != "kind"} for choice in best_lengths],
        "tables": report(study, rows, costs["steps"]),
    }
    common.write(args.output, environment | tables)


if __name__ == "__main__":
    main()
