"""Evaluation of a pair of models: all arms decode the same prompts with the same seeds, in one resumable run."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from mars_jax import drafters, verify
from mars_jax.cli.progress import Show
from mars_jax.core.types import PyTree
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import GROUP, Decoding
from mars_jax.lab.evaluate.benchmark import report
from mars_jax.lab.evaluate.benchmark.arm_loops import Evaluation
from mars_jax.lab.evaluate.benchmark.arm_rows import by_task
from mars_jax.lab.evaluate.scoring import samples
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows
from mars_jax.lab.provenance import provenance
from mars_jax.lab.training.online import Refiner
from mars_jax.mesh import hosts
from mars_jax.serve.rows import digest, fingerprint
from mars_jax.serve.session import Session
from mars_jax.utils import activity
from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__
from mars_jax.verify import RuleChoice, source_digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The inputs that `evaluate` and `tuned` share."""

    target: Pretrained
    problems: Sequence[Problem]
    rule: RuleChoice  # the rule to measure
    thetas: Sequence[float]  # thresholds of the rule, one arm each; empty for a rule without one
    temperatures: Sequence[float]  # all arms run at each
    max_new_tokens: int  # of each turn
    batch_size: int  # problems that decode at the same time
    seed: int  # problem i of a task draws with seed + i, in every arm
    chat: bool  # format questions, with all their turns, with the target's chat template
    names: Mapping[str, object]  # other settings that identify the run, such as the draft's name

    def settings(self, *draft_params: PyTree) -> JsonObject:
        """Return all settings that determine the rows. `draft_params` are the weights of the drafters."""
        # A rule may have weights, which determine the rows as well.
        loaded_rule = verify.load(self.rule.spec, self.target, **self.rule.settings)
        return {
            "target": self.target.name,
            **self.names,
            "rule": self.rule.as_json(but=("theta",) if self.thetas else ()),
            "thetas": [float(theta) for theta in self.thetas],
            "temperatures": self.temperatures,
            "tasks": {task: len(group) for task, group in by_task(self.problems).items()},
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "group": GROUP,  # consecutive batches per arm, which determine the order of the rows
            "seed": self.seed,
            "chat": self.chat,
            "problems": digest(repr(list(self.problems)).encode()),
            "weights": fingerprint((self.target.params, draft_params, loaded_rule.params), self.target.path),
            "rule_source": source_digest(self.rule.spec),
            "versions": {"mars-jax": __version__, "jax": jax.__version__},
            "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        }

    def decoding(self, drafter: drafters.LoadedDrafter, refiner: Refiner | None = None) -> Decoding:
        """Return the decoding settings with a drafter."""
        # Tasks are decoded one after another, so a batch never holds more problems than the largest task has.
        max_problems = max(len(group) for group in by_task(self.problems).values())
        session = Session(target=self.target, drafter=drafter, batch_size=min(self.batch_size, max_problems))
        return Decoding(session=session, chat=self.chat, max_new_tokens=self.max_new_tokens, refiner=refiner)


def evaluate(
    study: Study,
    drafter: drafters.LoadedDrafter,
    folder: Path,
    *,
    controls: str,
    refiner: Refiner | None,
    part: slice | None,
    progress: Show,
) -> JsonObject:
    """Decode and score every arm, and write rows, summary, table and plots.

    After a kill, call it again with the same arguments to continue. The files then equal those of an uninterrupted run,
    except for times.

    Args:
      study: what to measure.
      drafter: from `mars_jax.drafters.load`, with `sample=True` if it has weights and the rule is based on `rejection`.
      folder: new, empty, or from the run to continue.
      controls: as for `make_arms`.
      refiner: adds an arm whose draft learns from its rejected tokens. After a kill, the draft learns only from the
        remaining problems; the tokens stay the same.
      part: decode only `problems[part]` and write only their rows. A later run without a part reuses them if its
        rows.jsonl is the concatenation of all parts. Not allowed with a refiner, whose updates depend on all problems.
      progress: `(done, total, text)`, called after every group of decodes.

    Returns:
      The contents of summary.json, or {} for a part.

    Raises:
      MarsError: the folder holds the output of a different run.
    """
    settings = study.settings(drafter.params)
    settings |= {"drafter": drafter.drafter.name, "controls": controls}
    decoding = study.decoding(drafter, refiner)
    with contextlib.closing(open_rows(folder, settings)) as file:
        evaluation = Evaluation(decoding, folder, file, study.problems, settings, study.rule, part)
        evaluation.decode(progress)
        if part is not None:
            return {}
        rows = samples.with_results(folder, study.problems, evaluation.rows)
        with activity.doing("figures and plots"):
            summary = report.make_summary(
                settings,
                provenance() | {"machine": platform.machine(), "backend": jax.default_backend()},
                study.problems,
                rows,
                evaluation.arms,
            )
            if hosts.is_first():
                report.write_report(summary, evaluation.texts, folder)
    return summary
