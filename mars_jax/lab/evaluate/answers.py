"""Answers to evaluation problems, decoded turn by turn with one arm. The measured times exclude compilation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from mars_jax.cli.progress import announce
from mars_jax.core.metrics import Metrics
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.benchmark.arms import Arm
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.training.online import Refiner
from mars_jax.serve import requests as request
from mars_jax.serve.requests import Completion
from mars_jax.serve.session import Session
from mars_jax.utils.errors import MarsError

UPDATES = 8
"""Number of training updates to a refined draft after each group of problems."""
GROUP = 4
"""Number of batches that an arm decodes before the next arm takes over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one problem, over all of its turns."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # new tokens of each turn
    finish_reason: str  # "stop" or "length" of the last turn; "context" if a follow-up turn did not fit
    metrics: Metrics
    seconds: float  # this problem's share of the wall time of its turns, including prefill


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """The settings that all arms share: the pair of models, and how prompts become requests."""

    session: Session  # each arm replaces the session's rule with its own
    chat: bool = False
    max_new_tokens: int = 256
    refiner: Refiner | None = None  # only for the arm whose draft is refined

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        target = self.session.target
        return target.chat_stop_tokens if self.chat else target.stop_tokens

    @property
    def group(self) -> int:
        """Number of problems that an arm decodes before the next arm takes over.

        A group spans several batches, so that finished rows can be refilled with the next problem. It is short, so that
        a temporary slowdown of the machine affects all arms equally.
        """
        batch_size = self.session.batch_size
        if batch_size == 1:
            return 1
        return GROUP * batch_size

    def announce(self, problems: Sequence[Problem], num_answers: int) -> None:
        """Estimate how long `num_answers` answers to these problems will take, and print the estimate to stderr."""
        if num_answers > 0:
            prompts = [prompt_tokens(self.session.target, p, chat=self.chat) for p in problems[: self.group]]
            requests = self.requests(prompts, [0] * len(prompts), 0.0)
            seconds = self.session.plain_seconds(requests) / len(requests)
            announce(
                f"{num_answers:,} answers of at most {self.max_new_tokens} tokens", num_answers * seconds
            )

    def answer(
        self, arm: Arm, problems: Sequence[Problem], seeds: Sequence[int], *, temperature: float
    ) -> list[Answer]:
        """Decode the answers to some problems, for example one group, with `session.batch_size` rows in parallel.

        A finished row continues with the next problem. The prompt of a follow-up turn contains this arm's earlier
        answers.
        """
        target = self.session.target
        conversations: list[list[Completion]] = [[] for _ in problems]
        problem_seconds = [0.0] * len(problems)
        out_of_room = [False] * len(problems)
        # Decode turn by turn. A problem drops out after its last turn, or when its conversation no longer fits in the
        # context.
        for turn in range(max(len(turns_asked(p, self.chat)) for p in problems)):
            # Prompts of this turn, keyed by problem index.
            prompts: dict[int, list[int]] = {}
            for number, problem in enumerate(problems):
                if turn >= len(turns_asked(problem, self.chat)) or out_of_room[number]:
                    continue
                answer_texts = [completion.text for completion in conversations[number]]
                prompt_ids = prompt_tokens(target, problem, answer_texts, chat=self.chat)
                out_of_room[number] = turn > 0 and len(prompt_ids) >= target.config.max_positions
                if not out_of_room[number]:
                    prompts[number] = prompt_ids
            if not prompts:
                break
            turn_seeds = [seeds[number] for number in prompts]
            requests = self.requests(list(prompts.values()), turn_seeds, temperature, top_k=arm.top_k)
            completions, turn_seconds = self._run(arm, requests)
            # The rows decode in parallel, so each problem gets an equal share of the time.
            for number, completion in zip(prompts, completions, strict=True):
                conversations[number].append(completion)
                problem_seconds[number] += turn_seconds / len(requests)
        return [
            Answer(
                texts=tuple(c.text for c in completions),
                tokens=tuple(tuple(c.tokens) for c in completions),
                finish_reason="context" if out_of_room[number] else completions[-1].finish_reason,
                metrics=request.total_metrics(completions),
                seconds=problem_seconds[number],
            )
            for number, completions in enumerate(conversations)
        ]

    def requests(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, *, top_k: int = 0
    ) -> list[request.Request]:
        """Return the prompts as decoding requests."""
        return request.make_requests(
            self.session.target,
            prompts,
            chat=self.chat,
            temperature=temperature,
            top_k=top_k,
            seed=seeds,
            max_new_tokens=self.max_new_tokens,
        )

    def _run(self, arm: Arm, requests: list[request.Request]) -> tuple[list[Completion], float]:
        """Return the completions and the total time in seconds, which includes training a refined draft."""
        session = self.session if arm.drafts else self.session.autoregressive
        pair = session.using(arm.loaded_rule)
        if not arm.refines:
            return _decoded(pair, requests)
        # Decode with the draft model's current weights, and then train the draft model on these completions.
        refiner, params = self.refiner, pair.target.params
        assert refiner is not None
        drafter = pair.drafter._replace(params=refiner.params)
        refiner.warm_up(params)
        completions, seconds = _decoded(dataclasses.replace(pair, drafter=drafter, log_probs=True), requests)
        start_time = time.perf_counter()
        refiner.see_completions(completions)
        refiner.refine(params, steps=UPDATES)
        return completions, seconds + time.perf_counter() - start_time


def _decoded(pair: Session, requests: list[request.Request]) -> tuple[list[Completion], float]:
    """Compile all programs, then decode the requests. Return the completions and the time in seconds."""
    pair.warm_up(requests)
    decode_result = pair.decode(requests)
    return decode_result.completions, decode_result.seconds


def turns_asked(problem: Problem, chat: bool) -> tuple[str, ...]:
    """Return the turns to decode: all of them with a chat template, otherwise only the first."""
    return problem.turns if chat and not problem.continues else problem.turns[:1]


def prompt_tokens(
    target: Pretrained, problem: Problem, answers: Sequence[str] = (), *, chat: bool
) -> list[int]:
    """Return the prompt of the turn that follows `answers`, as token ids. It includes all earlier turns.

    Raises:
      MarsError: there is no chat template, or the prompt is empty.
    """
    if not answers:
        return target.encode(problem.turns[0], chat=chat and not problem.continues)
    messages = [{"role": "user", "content": problem.turns[0]}]
    for answer, turn in zip(answers, problem.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return target.encode_chat(messages)


def check_problems(target: Pretrained, problems: Sequence[Problem], *, chat: bool) -> None:
    """Raise MarsError if the target cannot decode a problem; the message contains the problem's id.

    `target` may be an outline.
    """
    for problem in problems:
        context = target.config.max_positions
        try:
            num_tokens = len(prompt_tokens(target, problem, chat=chat))
            if num_tokens >= context:
                raise MarsError(
                    f"the prompt has {num_tokens} tokens and '{target.name}' a context of {context}: remove it from "
                    "the file, or evaluate a target with a longer context."
                )
        except MarsError as error:
            raise MarsError(f"{problem.task}, problem {problem.id}: {error}") from None
