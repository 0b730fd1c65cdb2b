"""The rows of an evaluation: a JSON line per problem and arm, written before the next group of problems begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mars_jax.cli.progress import Show, speed
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate import scoring
from mars_jax.lab.evaluate.answers import Answer, Decoding, prompt_tokens, turns_asked
from mars_jax.lab.evaluate.benchmark.arms import Arm
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.provenance import stamp
from mars_jax.serve import likelihood
from mars_jax.serve.rows import Row, RowFile, plain
from mars_jax.serve.text import ends_in_loop


def place_of(task: str, temperature: float) -> str:
    """Return a name for a task at a temperature, for file names and progress reports."""
    return f"{task}, temperature {temperature:g}"


def by_task(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Group problems by task, in order of appearance."""
    problems_by_task: dict[str, list[Problem]] = {}
    for problem in problems:
        problems_by_task.setdefault(problem.task, []).append(problem)
    return problems_by_task


def turns_of(problems: Sequence[Problem], chat: bool) -> int:
    """Return the total number of turns in the problems."""
    return sum(len(turns_asked(problem, chat)) for problem in problems)


def make_row(
    arm: Arm,
    problem: Problem,
    seed: int,
    answer: Answer,
    score: list[float] | None,
    stop_tokens: Sequence[int],
) -> Row:
    """Return the row of one answer, without the key of its group. `score` is the result of `scoring.score_answer`."""
    counts = ("steps", "emitted", "proposed", "accepted_exact", "accepted_relaxed")
    return {
        "id": problem.id,
        "theta": plain(arm.theta),
        "seed": seed,
        "text": list(answer.texts),
        "tokens": [list(turn) for turn in answer.tokens],
        "finish_reason": answer.finish_reason,
        **{name: getattr(answer.metrics, name) for name in counts},
        "depth_histogram": list(answer.metrics.depth_histogram),
        "regret": answer.metrics.regret,
        "loops": any(ends_in_loop(turn, stop_tokens) for turn in answer.tokens),
        "score": score,
        "seconds": answer.seconds,
        **stamp(),
    }


def scored(
    decoding: Decoding, problems: Sequence[Problem], answers: Sequence[Answer]
) -> list[list[float] | None]:
    """Score the last turn of each answer with the metric of the task. The likelihood metric scores all turns.

    Args:
      decoding: the decoding that produced the answers.
      problems, answers: in the same order.
    """
    if problems[0].metric != "likelihood":
        return [scoring.score_answer(p, a.texts[-1]) for p, a in zip(problems, answers, strict=True)]
    target, chat = decoding.session.target, decoding.chat
    # One entry per turn: the number of its problem, its prompt with all earlier turns, and its tokens.
    problem_numbers, prompts, turn_tokens = [], [], []
    for number, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
        for turn, tokens in enumerate(answer.tokens):
            problem_numbers.append(number)
            prompts.append(prompt_tokens(target, problem, answer.texts[:turn], chat=chat))
            turn_tokens.append(tokens)
    likelihood_sums = np.zeros((len(problems), 2))
    np.add.at(likelihood_sums, problem_numbers, score_answers(target, prompts, turn_tokens))
    return [*likelihood_sums.tolist()]


def score_answers(
    target: Pretrained, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return each answer's total log-likelihood in nats and its number of tokens."""
    token_lists = [(*p, *a) for p, a in zip(prompts, answers, strict=True)]
    scored_texts = likelihood.score(target, token_lists, rows=min(likelihood.ROWS, len(token_lists)))
    # Entry i of `log_p` is the log-probability of token i + 1.
    return [
        [float(np.sum(text.log_p[len(prompt) - 1 :], dtype=np.float64)), float(len(answer))]
        for text, prompt, answer in zip(scored_texts, prompts, answers, strict=True)
    ]


@dataclasses.dataclass
class Recorder:
    """A recorder that decodes problems with several arms, stores the rows in a file and reports progress."""

    file: RowFile
    show: Show
    total: int  # number of turns over all arms and problems
    seeds: Mapping[tuple[str, str], int]  # keyed by task and id
    done: int = 0
    score: Callable[[Decoding, Sequence[Problem], Sequence[Answer]], list[list[float] | None]] = scored

    def decode(
        self,
        problems: Sequence[Problem],
        temperature: float,
        arms: Sequence[tuple[Arm, Decoding, int | None]],
    ) -> dict[tuple[str, int | None], list[Row]]:
        """Return the rows of several arms for problems of one task, keyed by arm name and draft length.

        Rows that are already in the file are not decoded again. All arms decode a group of problems before the next
        group begins, so that a temporary slowdown affects all arms equally.

        Args:
          problems: problems of one task.
          temperature: temperature of all requests.
          arms: the arms, each with its decoding and its draft length. The length is None if it is not part of a row's
            key. All arms have the same group size.
        """
        rows: dict[tuple[str, int | None], list[Row]] = {(arm.name, length): [] for arm, _, length in arms}
        group_size = arms[0][1].group
        for first in range(0, len(problems), group_size):
            group = problems[first : first + group_size]
            for arm, decoding, length in arms:
                rows[arm.name, length] += self._group_rows(group, temperature, arm, decoding, length)
        return rows

    def _group_rows(
        self,
        problems: Sequence[Problem],
        temperature: float,
        arm: Arm,
        decoding: Decoding,
        length: int | None,
    ) -> list[Row]:
        """Return an arm's rows for one group of problems."""
        row_key = {"task": problems[0].task, "temperature": temperature, "arm": arm.name}
        if length is not None:
            row_key["length"] = length
        seeds = [self.seeds[problem.task, problem.id] for problem in problems]

        def make() -> list[Row]:
            answers = decoding.answer(arm, problems, seeds, temperature=temperature)
            answer_columns = zip(
                problems, seeds, answers, self.score(decoding, problems, answers), strict=True
            )
            return [
                row_key | make_row(arm, problem, seed, answer, score, decoding.stop_tokens)
                for problem, seed, answer, score in answer_columns
            ]

        rows = self.file.batch([{**row_key, "id": problem.id} for problem in problems], make)
        self.done += turns_of(problems, decoding.chat)
        totals = {name: sum(row[name] for row in rows) for name in ("emitted", "steps", "seconds")}
        description = f"{place_of(problems[0].task, temperature)}, {arm.name}"
        if length:
            description += f", drafts of {length}"
        self.show(self.done, self.total, f"{description}, {speed(**totals)}")
        return rows
