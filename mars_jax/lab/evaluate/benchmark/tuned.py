"""Comparison of a lossy rule with the best lossless rule, each at its own best draft length.

A longer draft also yields more tokens per step, without changing the output. The first quarter of a task's problems
selects the lengths, and the remaining problems are scored. Source of the comparison: arXiv 2607.08690.

Tested against figures recomputed from the rows, and against direct decoding with the same pair
(tests/lab/evaluate/test_tuned.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from mars_jax import verify
from mars_jax.cli.progress import Show
from mars_jax.drafters import LoadedDrafter
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate import figures, scoring
from mars_jax.lab.evaluate.answers import Decoding
from mars_jax.lab.evaluate.benchmark import report
from mars_jax.lab.evaluate.benchmark.arms import ALONE, Arm, make_arms
from mars_jax.lab.evaluate.benchmark.rows import Recorder, by_task, turns_of
from mars_jax.lab.evaluate.benchmark.study import Study
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows, write_shared, write_shared_json
from mars_jax.lab.provenance import provenance
from mars_jax.serve.rows import Row
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject
from mars_jax.verify import RuleChoice

ENOUGH = 30
"""Number of problems below which the table shows a warning."""
SHARE = 4
"""One in `SHARE` problems is used to choose draft lengths."""
FILE, TABLE = "tuned.json", "table.md"


def arms_at(
    rule: RuleChoice, thetas: Sequence[float], temperature: float, target: Pretrained, *, samples: bool
) -> list[Arm]:
    """Return the lossless arms except the autoregressive one, then the arms of the measured rule.

    Args:
      rule: the measured rule.
      thetas: thresholds of the rule, one arm each.
      temperature: if it is above 0 and the drafter can sample, the arms include token-level and block-level
        `rejection`, and a rule based on `exact` is also measured with the base `rejection`.
      target: the target model, which a rule with weights needs.
      samples: whether the drafter can sample.

    >>> [arm.name for arm in arms_at(RuleChoice("mars", {}), [0.9], 1.0, None, samples=True)]
    ['exact', 'rejection', 'block', 'mars theta=0.9', 'mars over rejection theta=0.9']
    """
    rules = [RuleChoice("exact", {}), rule]
    if temperature > 0 and samples:
        rules += [RuleChoice("rejection", {}), RuleChoice("rejection", {"block": True})]
        if "base" in rule.definition.settings and rule.settled()["base"] == "exact":
            rules.append(rule.but(base="rejection"))
    # Drop the autoregressive arm, which `make_arms` returns first. A strict arm shared by several rules has the same
    # name for all of them, so it is measured only once.
    arms: dict[str, Arm] = {}
    for choice in rules:
        rule_thetas = thetas if choice.spec == rule.spec else ()
        choice_arms = make_arms(choice, rule_thetas, temperature=temperature, target=target, controls="paper")
        arms |= {arm.name: arm for arm in choice_arms[1:]}
    return sorted(arms.values(), key=lambda arm: not arm.loaded_rule.rule.lossless)


def tuned(study: Study, drafters: Mapping[bool, LoadedDrafter], *, progress: Show) -> JsonObject:
    """Choose the length of every arm on some problems, score all arms on the remaining ones, and write rows and tables.

    If the process is killed, call this again with the same arguments to continue.

    Args:
      study: the inputs of the run. `--tune` lists the chain lengths to try, in ascending order. `--draft-cost` is the
        cost of drafting one token, in forward passes of the target; if it is None, lengths are compared by measured
        wall time.
      drafters: from `mars_jax.drafters.load`, each with a chain of the greatest length to try; keyed by whether they
        sample.
      progress: called with `(done, total, text)` after every group of problems.

    Returns:
      The contents of tuned.json.

    Raises:
      MarsError: a task has only one problem, or the folder holds the output of a different run.
    """
    args, lengths, tasks = study.args, study.args.tune, by_task(study.problems)
    for task, group in tasks.items():
        if len(group) < 2:
            raise MarsError(
                f"the task {task} has 1 problem, and some choose lengths while others are scored: ask for at least 2."
            )
    settings = study.settings(*(drafter.params for drafter in drafters.values()))
    settings |= {"tuned": lengths, "draft_cost": args.draft_cost}
    arms = {
        temperature: arms_at(args.rule, study.thetas, temperature, study.target, samples=True in drafters)
        for temperature in args.temperatures
    }
    decodings = {
        (is_sampled, length): study.decoding(drafter._replace(drafter=drafter.drafter.resized(length)))
        for is_sampled, drafter in drafters.items()
        for length in lengths
    }
    # Count all turns for the progress bar: every arm at every length on the first problems of a task, then every arm
    # once on the others.
    num_turns, num_arms = 0, sum(map(len, arms.values()))
    for group in tasks.values():
        split = _split(group)
        num_turns += turns_of(group[:split], args.chat) * num_arms * len(lengths)
        # At each temperature, the autoregressive arm is run as well.
        num_turns += turns_of(group[split:], args.chat) * (num_arms + len(arms))
    with contextlib.closing(open_rows(args.output, settings)) as file:
        next(iter(decodings.values())).announce(study.problems, num_turns - len(file.rows))
        run = _Run(args, Recorder(file, progress, num_turns, study.seeds), decodings)
        task_tables = [
            run.table(group, temperature, arms[temperature])
            for group in tasks.values()
            for temperature in args.temperatures
        ]
        contents = {**provenance(), "settings": settings, "lengths": lengths, "tables": task_tables}
        write_shared_json(args.output / FILE, contents)
        write_shared(args.output / TABLE, tuned_markdown(contents))
    return contents


@dataclasses.dataclass
class _Run:
    """A run in progress, which measures one table after another."""

    args: argparse.Namespace
    recorder: Recorder
    decodings: Mapping[tuple[bool, int], Decoding]  # keyed by (whether the draft is sampled, its length)

    def table(self, problems: Sequence[Problem], temperature: float, arms: Sequence[Arm]) -> JsonObject:
        """Choose the lengths on the first problems of a task, then score the arms at these lengths on the others."""
        split, lengths, seed = _split(problems), self.args.tune, self.args.seed
        trial_arms = [(arm, length) for arm in arms for length in lengths]
        trial_rows = self._decode(problems[:split], temperature, trial_arms)
        rate_by_arm: dict[tuple[str, int], float] = {}
        for arm, length in trial_arms:
            rows = self._with_modelled_cost(trial_rows[arm.name, length], length)
            seconds = sum(row["seconds"] for row in rows)
            rate_by_arm[arm.name, length] = sum(row["emitted"] for row in rows) / seconds
        # Each arm uses the length at which its rate is highest.
        best_lengths = [max(lengths, key=lambda n, arm=arm: rate_by_arm[arm.name, n]) for arm in arms]
        tuned_arms = list(zip(arms, best_lengths, strict=True))
        decoded = self._decode(problems[split:], temperature, [(ALONE, 0), *tuned_arms])
        scored_rows = {
            key: scoring.write_and_score_samples(self.args.output, problems[split:], rows)
            for key, rows in decoded.items()
        }
        # The lengths and the baseline are chosen on the first problems. The figures come from the other problems, so
        # that these choices do not bias them.
        lossless_arm, lossless_length = max(
            (choice for choice in tuned_arms if choice[0].loaded_rule.rule.lossless),
            key=lambda choice: rate_by_arm[choice[0].name, choice[1]],
        )
        baseline_rows = self._with_modelled_cost(
            scored_rows[lossless_arm.name, lossless_length], lossless_length
        )
        alone_rows, metric = scored_rows[ALONE.name, 0], problems[0].metric
        summarize = functools.partial(figures.arm_figures, strict=None, metric=metric, seed=seed)
        arm_tables = []
        for arm, length in tuned_arms:
            rows = scored_rows[arm.name, length]
            over_lossless = summarize(self._with_modelled_cost(rows, length), baseline_rows)
            ratio = over_lossless["speedup"]
            arm_table = {
                **arm.legend(),
                "length": length,
                "tau_by_length": {str(n): figures.tau_of(trial_rows[arm.name, n]) for n in lengths},
                "rate_by_length": {str(n): rate_by_arm[arm.name, n] for n in lengths},
                **summarize(rows, alone_rows),
                "over_lossless": [ratio, *(over_lossless["intervals"]["speedup"] or (ratio, ratio))],
            }
            arm_tables.append(arm_table)
        return {
            "task": problems[0].task,
            "temperature": temperature,
            "metric": metric,
            "chosen_on": split,
            "problems": len(problems) - split,
            "best_lossless": lossless_arm.name,
            "alone": {**ALONE.legend(), **summarize(alone_rows, alone_rows)},
            "arms": arm_tables,
        }

    def _with_modelled_cost(self, rows: Sequence[Row], length: int) -> Sequence[Row]:
        """Return the rows. With --draft-cost, replace the measured seconds with a modelled cost."""
        if self.args.draft_cost is None:
            return rows
        # A step costs one forward pass of the target, plus `draft_cost` passes for each drafted token.
        return [row | {"seconds": row["steps"] * (1 + self.args.draft_cost * length)} for row in rows]

    def _decode(
        self, problems: Sequence[Problem], temperature: float, arms: Sequence[tuple[Arm, int]]
    ) -> dict[tuple[str, int | None], list[Row]]:
        """Return the rows of every arm and length. The autoregressive arm has length 0 and ignores its drafter."""
        decoded_arms = []
        for arm, length in arms:
            decoding = self.decodings[verify.needs_q(arm.loaded_rule.rule), length or self.args.tune[0]]
            decoded_arms.append((arm, decoding, length))
        return self.recorder.decode(problems, temperature, decoded_arms)


def _split(problems: Sequence[Problem]) -> int:
    """Return the number of problems used to choose lengths."""
    return math.ceil(len(problems) / SHARE)


def tuned_markdown(contents: JsonObject) -> str:
    """Return the contents of tuned.json as tables in Markdown."""
    columns = ("tau", "tokens/s", "speed", "score change", "relaxed", "loops")
    shown_tables = []
    for table in contents["tables"]:
        rows = []
        for arm in (table["alone"], *table["arms"]):
            # The arm without a draft has neither a length nor a ratio.
            row = {"drafted": arm.get("length", "-"), "over the best lossless": "-"}
            if "over_lossless" in arm:
                row["over the best lossless"] = "{:.2f} [{:.2f}, {:.2f}]".format(*arm["over_lossless"])
            rows.append(report.cells(arm, table["metric"]) | row)
        shown_tables.append(
            table
            | {"heading": report.heading(table), "score": scoring.METRICS[table["metric"]], "rows": rows}
        )
    return report.render(
        "tuned.md.jinja",
        title=report.title(contents["settings"]),
        **contents | {"tables": shown_tables},
        columns=["arm", "drafted", "over the best lossless", *columns],
        enough=ENOUGH,
        unscored=scoring.UNSCORED,
    )
