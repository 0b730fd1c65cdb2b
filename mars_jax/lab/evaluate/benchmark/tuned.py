"""Each arm at its own best draft length: a lossy rule compared with the best lossless one.

A longer draft gives more tokens per step too, and it changes no text. The first quarter of the problems of a task
chooses the lengths, and the others are scored. Source of the comparison: arXiv 2607.08690.

Oracle: recounts from rows, and decodes of the same pair (tests/lab/evaluate/test_tuned.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax import verify
from mars_jax.cli.progress import Show, speed
from mars_jax.core.errors import MarsError
from mars_jax.drafters import LoadedDrafter
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.answers import Decoding
from mars_jax.lab.evaluate.benchmark import tables
from mars_jax.lab.evaluate.benchmark.arm_loops import by_task, scored, turns_of
from mars_jax.lab.evaluate.benchmark.arm_rows import make_row
from mars_jax.lab.evaluate.benchmark.arms import ALONE, MARS, Arm, make_arms
from mars_jax.lab.evaluate.benchmark.run import common_settings
from mars_jax.lab.evaluate.scoring import samples
from mars_jax.lab.evaluate.scoring.scores import METRICS
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows, write_json
from mars_jax.lab.provenance import provenance
from mars_jax.placement import hosts
from mars_jax.serve.rows import Row, RowFile, write_whole
from mars_jax.serve.session import Session
from mars_jax.specs import RuleChoice

LENGTHS = (2, 3, 5, 8, 12)
"""Default lengths of the chains to try."""
ENOUGH = 30
"""Problems below which the table has a warning."""
SHARE = 4
"""One problem in `SHARE` chooses lengths."""
RESAMPLES = 2000
FILE, TABLE = "tuned.json", "table.md"


def arms_at(
    rule: RuleChoice, thetas: Sequence[float], temperature: float, target: Pretrained, *, samples: bool
) -> list[Arm]:
    """Return the lossless arms, then those of the rule, without the target alone.

    Args:
      rule: the measured rule.
      thetas: its thresholds, one arm each.
      temperature: above 0, `rejection` by tokens and by blocks can verify a sampled draft, and a rule over `exact` also
        runs over `rejection`.
      target: for a rule with weights.
      samples: whether the drafter can sample.

    >>> [arm.name for arm in arms_at(MARS, [0.9], 1.0, None, samples=True)]
    ['exact', 'rejection', 'block', 'mars theta=0.9', 'mars over rejection theta=0.9']
    """
    rules = [RuleChoice("exact", {}), rule]
    if temperature > 0 and samples:
        rules += [RuleChoice("rejection", {}), RuleChoice("rejection", {"block": True})]
        if "base" in rule.row.settings and rule.settled()["base"] == "exact":
            rules.append(rule.but(base="rejection"))
    arms: dict[str, Arm] = {}
    for choice in rules:
        own_thetas = thetas if choice.spec == rule.spec else ()
        made = make_arms(choice, own_thetas, temperature=temperature, target=target, controls="paper")
        arms |= {arm.name: arm for arm in made[1:]}
    return sorted(arms.values(), key=lambda arm: not arm.rule.rule.lossless)


def tuned(
    target: Pretrained,
    drafters: Mapping[bool, LoadedDrafter],
    problems: Sequence[Problem],
    output: Path,
    *,
    rule: RuleChoice = MARS,
    thetas: Sequence[float] | None = None,
    lengths: Sequence[int] = LENGTHS,
    cost: float | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool = False,
    names: Mapping[str, Any] | None = None,
    progress: Show | None = None,
) -> dict[str, Any]:
    """Choose the length of every arm on some problems, score all arms on the others, and write rows and tables.

    Call it again with the same arguments to continue after a kill.

    Args:
      target: from `mars_jax.load`.
      drafters: the drafter by whether it samples, from `mars_jax.drafters.load`, with a chain of the longest length.
      lengths: lengths of the chains to try.
      cost: cost of drafting a token in forwards of the target. None: use the clock of this machine.
      problems, output, rule, thetas, temperatures, max_new_tokens, batch_size, seed, chat, names, progress: as for
        `evaluate`.

    Returns:
      The content of tuned.json.

    Raises:
      MarsError: a task of one problem, problems that do not fit the target, an output of another run.
    """
    tasks = by_task(problems)
    for task, group in tasks.items():
        if len(group) < 2:
            raise MarsError(
                f"the task {task} has 1 problem, and some choose lengths while others are scored: ask for at least 2."
            )
    settings = common_settings(
        target,
        [drafter.params for drafter in drafters.values()],
        problems,
        rule=rule,
        thetas=thetas,
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        chat=chat,
        names=names,
    )
    settings |= {"tuned": sorted(lengths), "draft_cost": cost}
    arms = {
        temperature: arms_at(rule, settings["thetas"], temperature, target, samples=True in drafters)
        for temperature in settings["temperatures"]
    }
    with contextlib.closing(open_rows(output, settings)) as file:
        run = _Run(target, drafters, file, output, settings)
        run.start(tasks, arms, progress or (lambda done, total, text: None))
        found = [
            run.table(task, group, temperature, arms[temperature])
            for task, group in tasks.items()
            for temperature in settings["temperatures"]
        ]
        report = {**provenance(), "settings": settings, "lengths": sorted(lengths), "tables": found}
        write_json(output / FILE, report)
        if hosts.is_first():
            write_whole(output / TABLE, markdown(report))
    return report


@dataclasses.dataclass
class _Run:
    """The decodes of a run. Arms take turns within a group of problems, so that a slow spell affects all alike."""

    target: Pretrained
    drafters: Mapping[bool, LoadedDrafter]  # by whether the draft is sampled; each can be resized
    file: RowFile
    folder: Path
    settings: Mapping[str, Any]

    def start(
        self, tasks: Mapping[str, Sequence[Problem]], arms: Mapping[float, Sequence[Arm]], show: Show
    ) -> None:
        """Count the turns of all decodes."""
        self._decodings: dict[tuple[bool, int], Decoding] = {}
        self._show, self._done, self._total = show, 0, 0
        for group in tasks.values():
            split = _split(group)
            choosing, scoring = (
                turns_of(part, self.settings["chat"]) for part in (group[:split], group[split:])
            )
            for arms_here in arms.values():
                self._total += choosing * len(arms_here) * len(self.settings["tuned"])
                self._total += scoring * (1 + len(arms_here))

    def table(
        self, task: str, problems: Sequence[Problem], temperature: float, arms: Sequence[Arm]
    ) -> dict[str, Any]:
        """Choose the lengths, then score the arms at these lengths."""
        split, lengths, seed = _split(problems), self.settings["tuned"], self.settings["seed"]
        tried = [(arm, length) for arm in arms for length in lengths]
        trials = self._decode(task, problems[:split], 0, temperature, tried)
        rates = {key: self._rate(rows, key[1]) for key, rows in trials.items()}
        best = [(arm, max(lengths, key=lambda n, arm=arm: rates[arm.name, n])) for arm in arms]
        rows = self._decode(task, problems[split:], split, temperature, [(ALONE, 0), *best])
        rows = {
            key: samples.with_results(self.folder, problems[split:], rows_of_arm)
            for key, rows_of_arm in rows.items()
        }
        lossless, length = max(
            ((arm, n) for arm, n in best if arm.rule.rule.lossless),
            key=lambda choice: rates[choice[0].name, choice[1]],
        )
        baseline, metric = rows[lossless.name, length], problems[0].metric
        summarize = functools.partial(
            figures.summarize, alone=rows[ALONE.name, 0], strict=None, metric=metric, seed=seed
        )
        return {
            "task": task,
            "temperature": temperature,
            "metric": metric,
            "chosen_on": split,
            "problems": len(problems) - split,
            "best_lossless": lossless.name,
            "alone": {**ALONE.legend(), **summarize(rows[ALONE.name, 0])},
            "arms": [
                {
                    **arm.legend(),
                    "length": n,
                    "tau_by_length": {str(k): _tau(trials[arm.name, k]) for k in lengths},
                    "rate_by_length": {str(k): rates[arm.name, k] for k in lengths},
                    **summarize(rows[arm.name, n]),
                    "over_lossless": ratio(
                        self._counts(rows[arm.name, n], n), self._counts(baseline, length), seed
                    ),
                }
                for arm, n in best
            ],
        }

    def _counts(self, rows: Sequence[Row], length: int) -> np.ndarray:
        """Return the tokens and the time of each row, f64[n, 2]: seconds, or forwards of the target."""
        cost = self.settings["draft_cost"]
        if cost is None:
            return np.asarray([[row["emitted"], row["seconds"]] for row in rows], np.float64)
        return np.asarray([[row["emitted"], row["steps"] * (1 + cost * length)] for row in rows], np.float64)

    def _rate(self, rows: Sequence[Row], length: int) -> float:
        tokens, time = self._counts(rows, length).sum(axis=0)
        return float(tokens / time)

    def _decoding(self, arm: Arm, length: int) -> Decoding:
        """Return the decoding with drafts of a length, which keeps its compiled programs."""
        key = (verify.needs_q(arm.rule.rule), length)
        if key not in self._decodings:
            drafter = self.drafters[key[0]]
            assert drafter.resized is not None
            session = Session(
                target=self.target,
                drafter=drafter._replace(drafter=drafter.resized(length)),
                batch_size=min(self.settings["batch_size"], max(self.settings["tasks"].values())),
            )
            self._decodings[key] = Decoding(
                session=session,
                chat=self.settings["chat"],
                max_new_tokens=self.settings["max_new_tokens"],
            )
        return self._decodings[key]

    def _decode(
        self,
        task: str,
        problems: Sequence[Problem],
        begin: int,
        temperature: float,
        arms: Sequence[tuple[Arm, int]],
    ) -> dict[tuple[str, int], list[Row]]:
        """Return the rows of every arm and length. `begin` is the number of the first problem in its task."""
        all_rows: dict[tuple[str, int], list[Row]] = {(arm.name, n): [] for arm, n in arms}
        size = self._decoding(*arms[-1]).group
        for first in range(0, len(problems), size):
            group = list(problems[first : first + size])
            seeds = [(self.settings["seed"] + begin + first + i) % 2**32 for i in range(len(group))]
            for arm, n in arms:
                key = {"task": task, "temperature": temperature, "arm": arm.name, "length": n}
                make = functools.partial(self._rows, arm, n, group, seeds, temperature)
                rows = self.file.batch([{**key, "id": problem.id} for problem in group], make)
                all_rows[arm.name, n] += rows
                sums = {name: sum(row[name] for row in rows) for name in ("emitted", "steps", "seconds")}
                drafts = f", drafts of {n}" if n else ""
                text = f"{task}, temperature {temperature:g}, {arm.name}{drafts}, {speed(**sums)}"
                self._done += turns_of(group, self.settings["chat"])
                self._show(self._done, self._total, text)
        return all_rows

    def _rows(
        self, arm: Arm, length: int, group: list[Problem], seeds: list[int], temperature: float
    ) -> list[Row]:
        # The target alone ignores the length of the draft.
        decoding = self._decoding(arm, length or self.settings["tuned"][0])
        answers = decoding.answer(arm, group, seeds, temperature=temperature)
        scores = scored(decoding, group, answers)
        return [
            {
                **make_row(problem, arm, temperature, seed, answer, score, decoding.stop_tokens),
                "length": length,
            }
            for problem, seed, answer, score in zip(group, seeds, answers, scores, strict=True)
        ]


def _split(problems: Sequence[Problem]) -> int:
    """Return the number of problems that choose lengths."""
    return math.ceil(len(problems) / SHARE)


def _tau(rows: Sequence[Row]) -> float:
    return sum(row["emitted"] for row in rows) / sum(row["steps"] for row in rows)


def ratio(counts: np.ndarray, others: np.ndarray, seed: int) -> list[float]:
    """Return the ratio of two rates with its 95% interval by the paired bootstrap: [value, low, high].

    Args:
      counts, others: f64[n, 2]; tokens and time of the same n problems, as `_Run._counts` returns them.
      seed: seed of the resampling.

    >>> ratio(np.asarray([[3.0, 1.0], [3.0, 1.0]]), np.asarray([[2.0, 1.0], [2.0, 1.0]]), 0)
    [1.5, 1.5, 1.5]
    """
    n = len(counts)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    weights = np.concatenate([np.ones((1, n)), draws])  # the first row is the sample itself
    sums, other_sums = weights @ counts, weights @ others
    ratios = (sums[:, 0] / sums[:, 1]) / (other_sums[:, 0] / other_sums[:, 1])
    return [float(ratios[0]), *np.quantile(ratios[1:], [0.025, 0.975]).tolist()]


def markdown(report: Mapping[str, Any]) -> str:
    """Return the tables in Markdown."""
    settings, cost = report["settings"], report["settings"]["draft_cost"]
    by = "the clock" if cost is None else f"tokens per step over 1 + {cost:g} K, for K drafted tokens"
    lines = [
        "# Each rule at its own best draft length",
        "",
        f"{tables.title(settings)}, up to {settings['max_new_tokens']} tokens, batch {settings['batch_size']}. "
        f"Lengths {', '.join(map(str, report['lengths']))} were compared by {by}, on problems that no figure uses. "
        "Intervals are 95%, by the paired bootstrap over problems.",
        "",
    ]
    columns = ("arm", "tau", "tokens/s", "speed", "score change", "relaxed", "loops")
    for table in report["tables"]:
        few = table["problems"] < ENOUGH
        rows = []
        for arm in (table["alone"], *table["arms"]):
            over = arm.get("over_lossless")
            cells = tables.cells(arm, table["metric"])
            name, *rest = (cells[column] for column in columns)
            draft = [
                str(arm.get("length", "-")),
                "-" if over is None else "{:.2f} [{:.2f}, {:.2f}]".format(*over),
            ]
            rows.append([name, *draft, *rest])
        lines += [
            f"## {tables.heading(table)}",
            "",
            f"{table['problems']} problems, after {table['chosen_on']} that chose; score: {METRICS[table['metric']]}. "
            f"The best lossless arm is {table['best_lossless']}."
            + (f" Fewer than {ENOUGH} problems are not evidence." if few else ""),
            "",
            *tables.markdown_table(["arm", "drafted", "over the best lossless", *columns[1:]], rows),
            "",
        ]
        if table["metric"] == "pass@1" and table["alone"]["score"] is None:
            lines += [samples.UNSCORED, ""]
    return "\n".join(lines)
