"""The loops of a run. Arms alternate within each group of problems, so that a slow spell affects all arms alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mars_jax.cli.progress import Show
from mars_jax.lab.evaluate.answers import Decoding, prompt_tokens
from mars_jax.lab.evaluate.benchmark.arm_rows import Recorder, by_task, place_of, turns_of
from mars_jax.lab.evaluate.benchmark.arms import Arm, make_arms
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import read_shared_json, write_shared_json
from mars_jax.serve.queue import Said
from mars_jax.serve.rows import Row, RowFile
from mars_jax.utils import activity
from mars_jax.utils.types import JsonObject
from mars_jax.verify import RuleChoice

TEXTS = "texts.json"
SHOWN = 8
"""Number of problems per task whose completions are stored for the report, with the kind of every token."""


class Evaluation:
    """The loops of one run over its tasks, temperatures, batches and arms."""

    def __init__(
        self,
        decoding: Decoding,
        folder: Path,
        file: RowFile,
        problems: Sequence[Problem],
        settings: JsonObject,
        rule: RuleChoice,
        part: slice | None = None,
    ):
        self._decoding, self._folder, self._settings = decoding, folder, settings
        self._file, self._is_part = file, part is not None
        self.rows: list[Row] = []
        # Make the arms only once for each temperature, because `make_arms` reads the weights of the rule.
        self.arms: dict[float, list[Arm]] = {
            temperature: make_arms(
                rule,
                settings["thetas"],
                temperature=temperature,
                target=decoding.session.target,
                refined=decoding.refiner is not None,
                controls=settings["controls"],
            )
            for temperature in settings["temperatures"]
        }
        self._tasks = by_task(problems[part or slice(None)])
        # Number all problems, so that seeds do not depend on the part.
        self._seeds = {
            (task, p.id): (settings["seed"] + i) % 2**32
            for task, group in by_task(problems).items()
            for i, p in enumerate(group)
        }
        # Without rows on file, ignore stored completions: they may be from a run with different settings.
        self.texts: JsonObject = {}
        if file.rows:
            self.texts = read_shared_json(folder / TEXTS) or {}

    def decode(self, show: Show) -> None:
        """Decode all rows that are not on file."""
        group_size = self._decoding.group
        num_turns = sum(turns_of(problems, self._decoding.chat) for problems in self._tasks.values())
        first_task = next(iter(self._tasks.values()))
        recorder = Recorder(self._file, show, num_turns * sum(map(len, self.arms.values())))
        self._decoding.announce(first_task, recorder.total - len(self._file.rows))
        for task, problems in self._tasks.items():
            for temperature, arms in self.arms.items():
                for first in range(0, len(problems), group_size):
                    group = problems[first : first + group_size]
                    seeds = [self._seeds[task, problem.id] for problem in group]
                    for arm in arms:
                        self.rows += recorder.rows(self._decoding, arm, temperature, group, seeds)
                if not self._is_part:
                    self._keep_texts(task, temperature)

    def _shown(self, temperature: float) -> list[Arm]:
        """Return the arms whose completions the page shows: the strict rule, and the measured rule's first arm."""
        if self._settings["controls"] == "none":
            return []
        arm_by_role = {arm.role: arm for arm in reversed(self.arms[temperature])}
        return [arm_by_role[role] for role in ("strict", "rule") if role in arm_by_role]

    @activity.doing("texts for the page")
    def _keep_texts(self, task: str, temperature: float) -> None:
        """Decode the first turn of the first problems again, step by step, and write each token's text and kind."""
        place, arms = place_of(task, temperature), self._shown(temperature)
        problems = self._tasks[task][:SHOWN]
        if place in self.texts or not arms:
            return
        decoding = self._decoding
        prompts = [prompt_tokens(decoding.session.target, p, chat=decoding.chat) for p in problems]
        requests = decoding.requests(prompts, [self._seeds[task, p.id] for p in problems], temperature)
        texts = [{"id": p.id, "prompt": p.turns[0], "arms": {}} for p in problems]
        for arm in arms:
            for text in texts:
                text["arms"][arm.name] = []
            for event in decoding.session.using(arm.loaded_rule).stream(requests):
                if isinstance(event, Said):
                    texts[event.index]["arms"][arm.name] += event.pieces
        self.texts[place] = texts
        write_shared_json(self._folder / TEXTS, self.texts)
