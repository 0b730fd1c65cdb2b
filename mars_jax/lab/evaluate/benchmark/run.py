"""Evaluation of a pair of models: all arms decode the same prompts with the same seeds, in one resumable run."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mars_jax import __version__, drafters, specs, verify
from mars_jax.cli.progress import Show
from mars_jax.core import activity
from mars_jax.core.errors import MarsError
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import GROUP, Decoding, check_problems
from mars_jax.lab.evaluate.benchmark import report
from mars_jax.lab.evaluate.benchmark.arm_loops import Evaluation, by_task
from mars_jax.lab.evaluate.benchmark.arms import CONTROLS, MARS, default_thetas
from mars_jax.lab.evaluate.scoring import samples, scores
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows
from mars_jax.lab.pictures import check_installed
from mars_jax.lab.provenance import provenance
from mars_jax.lab.training.online import Refiner
from mars_jax.placement import hosts
from mars_jax.serve.fingerprint import digest, fingerprint
from mars_jax.serve.session import Session
from mars_jax.specs import RuleChoice


def evaluate(
    target: Pretrained,
    drafter: drafters.LoadedDrafter,
    problems: Sequence[Problem],
    output: str | os.PathLike[str],
    *,
    rule: RuleChoice = MARS,
    thetas: Sequence[float] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    controls: str = "paper",
    max_new_tokens: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool = False,
    refiner: Refiner | None = None,
    part: slice | None = None,
    names: Mapping[str, Any] | None = None,
    progress: Show | None = None,
) -> dict[str, Any]:
    """Decode and score every arm, and write rows, summary, table and plots under `output`.

    Call it again with the same arguments to continue after a kill. The files are then those of an uninterrupted run,
    except for times.

    Args:
      target: from `mars_jax.load`.
      drafter: from `mars_jax.drafters.load`, with `sample=True` if the rule is based on `rejection` and it has weights.
      problems: from `tasks.read`.
      output: a folder: new, empty, or of the run to continue.
      rule: the rule to measure, by name, such as `specs.RuleChoice("mars", {"margin": "gap"})` or
        `specs.RuleChoice("gates.py:entropy_gate", {"entropy": 1.5})`, whose file is run.
      thetas: thresholds of the rule, one arm each; controls use the first. Default: the rule's own threshold, or none
        for a rule without one and for a user's rule.
      temperatures: all arms run at each.
      controls: what the rule is compared with besides the target alone: "none"; "paper" for the strict rule; "all" for
        the strict rule and the target sampling from the tokens that the rule lets a draft choose from.
      max_new_tokens: limit for each turn.
      batch_size: number of problems that decode at the same time.
      seed: problem i of a task draws with seed + i, in every arm.
      chat: format questions, with all their turns, with the target's chat template.
      refiner: adds an arm whose draft learns from its rejected tokens. After a kill, the draft learns only from the
        remaining problems, and the tokens stay the same.
      part: decode only `problems[part]`, and write only their rows. A run without a part then takes them from the
        rows.jsonl of all parts, one after the other. It takes no refiner, whose updates depend on all problems.
      names: other settings that identify the run, such as the draft's name.
      progress: `(done, total, text)`, called after every group of decodes.

    Returns:
      The content of summary.json, or {} for a part.

    Raises:
      MarsError: problems that do not fit the target, an output of another run, a package that is missing.
    """
    if controls not in CONTROLS:
        raise MarsError(f"controls is {controls!r}: expected one of {', '.join(CONTROLS)}.")
    if part is not None:
        if refiner is not None:
            raise MarsError("a refiner does not apply to a part: leave one out.")
        if not problems[part]:
            raise MarsError(f"--part has none of the {len(problems)} problems: divide them into fewer parts.")
    check_installed()
    settings = common_settings(
        target,
        drafter.params,
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
    settings |= {"drafter": drafter.drafter.name, "controls": controls}
    folder = Path(output)
    largest = max(settings["tasks"].values())
    session = Session(target=target, drafter=drafter, batch_size=min(batch_size, largest))
    decoding = Decoding(session=session, chat=chat, max_new_tokens=max_new_tokens, refiner=refiner)
    with contextlib.closing(open_rows(folder, settings)) as file:
        evaluation = Evaluation(decoding, folder, file, problems, settings, rule, part)
        evaluation.decode(progress or (lambda done, total, text: None))
        if part is not None:
            return {}
        rows = samples.with_results(folder, problems, evaluation.rows)
        with activity.doing("figures and plots"):
            summary = report.summarize(
                settings,
                provenance() | {"machine": platform.machine(), "backend": jax.default_backend()},
                {problem.task: problem.metric for problem in problems},
                report.notes(settings, problems),
                rows,
                lambda temperature: [arm.legend() for arm in evaluation.arms(temperature)],
            )
            if hosts.is_first():
                report.write(summary, evaluation.texts, folder)
    return summary


def common_settings(
    target: Pretrained,
    draft_params: Any,
    problems: Sequence[Problem],
    *,
    rule: RuleChoice,
    thetas: Sequence[float] | None,
    temperatures: Sequence[float],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    chat: bool,
    names: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Check the arguments that `evaluate` and `tuned` share, and return everything that decides the rows.

    Raises:
      MarsError: a value out of range, problems that do not fit the target.
    """
    if not problems:
        raise MarsError("there are no problems to evaluate on: ask for at least 1.")
    thetas = [float(theta) for theta in (default_thetas(rule) if thetas is None else thetas)]
    temperatures = [float(temperature) + 0.0 for temperature in temperatures]  # -0 is 0
    for name, values in (("thetas", thetas), ("temperatures", temperatures)):
        if (not values and name == "temperatures") or len({f"{value:g}" for value in values}) < len(values):
            raise MarsError(f"{name} are {values}: give at least one, and each once.")
    if math.inf in thetas:
        raise MarsError("thetas holds inf, which is the strict rule: leave it out.")
    for theta in thetas:
        rule.but(theta=theta)
    scores.check_metrics(problems)
    check_problems(target, problems, chat=chat)
    loaded_rule = verify.load(rule.spec, target, **rule.settings)
    return {
        "target": target.name,
        **(names or {}),
        "rule": rule.as_json(but=("theta",) if thetas else ()),
        "thetas": thetas,
        "temperatures": temperatures,
        "tasks": {task: len(group) for task, group in by_task(problems).items()},
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "group": GROUP,  # consecutive batches of an arm, which decide the order of the rows
        "seed": seed,
        "chat": chat,
        "problems": digest(repr(list(problems)).encode()),
        "weights": fingerprint((target.params, draft_params, loaded_rule.params), target.path),
        "rule_source": specs.source_digest(rule.spec),
        "versions": {"mars-jax": __version__, "jax": jax.__version__},
        "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
    }
