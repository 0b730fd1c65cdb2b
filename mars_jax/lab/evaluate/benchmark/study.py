"""Evaluation of a pair of models. All arms decode the same prompts with the same seeds, in one resumable run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import platform
from collections.abc import Mapping, Sequence

import jax

from mars_jax import drafters, verify
from mars_jax.cli.progress import Show
from mars_jax.core.types import PyTree
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate import scoring
from mars_jax.lab.evaluate.answers import GROUP, Decoding, prompt_tokens
from mars_jax.lab.evaluate.benchmark import report
from mars_jax.lab.evaluate.benchmark.arms import Arm, default_thetas, make_arms
from mars_jax.lab.evaluate.benchmark.rows import Recorder, by_task, place_of, turns_of
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows, read_shared_json, write_shared_json
from mars_jax.lab.provenance import provenance
from mars_jax.lab.training.online import Refiner
from mars_jax.serve.queue import Said
from mars_jax.serve.rows import Row, digest, fingerprint
from mars_jax.serve.session import Session
from mars_jax.utils import activity, hosts
from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__
from mars_jax.verify import source_digest

TEXTS = "texts.json"
SHOWN = 8
"""Number of problems per task whose completions are stored for the report, with the kind of every token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The inputs that `evaluate`, `tuned` and `calibrate` share."""

    args: argparse.Namespace  # flags of `mars-jax benchmark`, or of `calibrate`
    target: Pretrained
    problems: Sequence[Problem]
    names: Mapping[str, object]  # other settings that identify the run, such as the draft's name

    @functools.cached_property
    def seeds(self) -> dict[tuple[str, str], int]:
        """Seeds of the problems, the same in every arm, keyed by task and id: problem i of a task uses `seed + i`."""
        return {
            (task, problem.id): (self.args.seed + i) % 2**32
            for task, problems in by_task(self.problems).items()
            for i, problem in enumerate(problems)
        }

    @functools.cached_property
    def thetas(self) -> list[float]:
        """Thresholds of the rule, one arm each."""
        return self.args.thetas or default_thetas(self.args.rule)

    def settings(self, *draft_params: PyTree) -> JsonObject:
        """Return all settings that determine the rows. `draft_params` are the weights of the drafters."""
        args, rule = self.args, self.args.rule
        # Load the rule, because its weights, if it has any, also determine the rows.
        loaded_rule = verify.load(rule.spec, self.target, **rule.settings)
        return {
            "target": self.target.name,
            **self.names,
            "rule": rule.as_json(but=("theta",) if self.thetas else ()),
            "thetas": [float(theta) for theta in self.thetas],
            "temperatures": args.temperatures,
            "tasks": {task: len(group) for task, group in by_task(self.problems).items()},
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
            "group": GROUP,  # number of consecutive batches per arm; determines the order of the rows
            "seed": args.seed,
            "chat": args.chat,
            "problems": digest(repr(list(self.problems)).encode()),
            "weights": fingerprint((self.target.params, draft_params, loaded_rule.params), self.target.path),
            "rule_source": source_digest(rule.spec),
            "versions": {"mars-jax": __version__, "jax": jax.__version__},
            "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        }

    def decoding(self, drafter: drafters.LoadedDrafter, refiner: Refiner | None = None) -> Decoding:
        """Return the decoding settings for a drafter."""
        args = self.args
        # Tasks are decoded one after another, so a batch never needs more rows than the largest task has problems.
        max_problems = max(len(group) for group in by_task(self.problems).values())
        session = Session(target=self.target, drafter=drafter, batch_size=min(args.batch_size, max_problems))
        return Decoding(session=session, chat=args.chat, max_new_tokens=args.max_new_tokens, refiner=refiner)

    @activity.doing("texts for the page")
    def page_texts(
        self, decoding: Decoding, arms: Sequence[Arm], problems: Sequence[Problem], temperature: float
    ) -> list[JsonObject]:
        """Decode the first turn of each problem again, step by step, and return the text and kind of each token.

        Only two arms are decoded: the strict rule, and the first arm of the measured rule.
        """
        prompts = [prompt_tokens(self.target, p, chat=decoding.chat) for p in problems]
        requests = decoding.requests(prompts, [self.seeds[p.task, p.id] for p in problems], temperature)
        texts = [{"id": p.id, "prompt": p.turns[0], "arms": {}} for p in problems]
        arm_by_role = {arm.role: arm for arm in reversed(arms)}
        for arm in (arm_by_role[role] for role in ("strict", "rule") if role in arm_by_role):
            for text in texts:
                text["arms"][arm.name] = []
            for event in decoding.session.using(arm.loaded_rule).stream(requests):
                if isinstance(event, Said):
                    texts[event.index]["arms"][arm.name] += event.pieces
        return texts


def evaluate(
    study: Study, drafter: drafters.LoadedDrafter, *, refiner: Refiner | None, progress: Show
) -> JsonObject:
    """Decode and score every arm, and write the rows, summary, table and plots to `--output`.

    If the process is killed, call this again with the same arguments to continue. Except for times, the files are then
    the same as those of an uninterrupted run.

    Args:
      study: the inputs of the run. With `--part`, decode only these problems and write only their rows. A later run
        without `--part` reuses the rows if its rows.jsonl is the concatenation of the files of all parts. `--part`
        cannot be combined with a refiner, because the updates of the draft depend on all problems.
      drafter: from `mars_jax.drafters.load`, with `sample=True` if it has weights and the rule is based on `rejection`.
      refiner: adds an arm whose draft learns from its rejected tokens. If the run was killed and continued, the draft
        learns only from the remaining problems; the decoded tokens are the same.
      progress: called with `(done, total, text)` after every group of problems.

    Returns:
      The contents of summary.json, or {} for a part.

    Raises:
      MarsError: the folder holds the output of a different run.
    """
    args, folder = study.args, study.args.output
    settings = study.settings(drafter.params)
    settings |= {"drafter": drafter.drafter.name, "controls": args.controls}
    decoding = study.decoding(drafter, refiner)
    # Make the arms only once for each temperature, because `make_arms` reads the weights of the rule.
    refines = refiner is not None
    make = functools.partial(make_arms, target=study.target, refined=refines, controls=args.controls)
    arms_at = {t: make(args.rule, study.thetas, temperature=t) for t in args.temperatures}
    tasks = by_task(study.problems[args.part or slice(None)])
    num_turns = sum(turns_of(group, args.chat) for group in tasks.values()) * sum(map(len, arms_at.values()))
    rows: list[Row] = []
    texts: JsonObject = {}
    with contextlib.closing(open_rows(folder, settings)) as file:
        # If the file has no rows yet, ignore stored completions: they may be from a run with different settings.
        if file.rows:
            texts = read_shared_json(folder / TEXTS) or {}
        decoding.announce(next(iter(tasks.values())), num_turns - len(file.rows))
        recorder = Recorder(file, progress, num_turns, study.seeds)
        for (task, group), (temperature, arms) in itertools.product(tasks.items(), arms_at.items()):
            arm_rows = recorder.decode(group, temperature, [(arm, decoding, None) for arm in arms])
            rows += itertools.chain(*arm_rows.values())
            place = place_of(task, temperature)
            if args.part is None and args.controls != "none" and place not in texts:
                texts[place] = study.page_texts(decoding, arms, group[:SHOWN], temperature)
                write_shared_json(folder / TEXTS, texts)
        if args.part is not None:
            return {}
        rows = scoring.write_and_score_samples(folder, study.problems, rows)
        with activity.doing("figures and plots"):
            environment = provenance() | {"machine": platform.machine(), "backend": jax.default_backend()}
            summary = report.make_summary(settings, environment, study.problems, rows, arms_at)
            if hosts.is_first():
                report.write_report(summary, texts, folder)
    return summary
