"""Error cascades: what one relaxed token does to the text after it.

At a relaxed token the strict rule continues the text twice, once after that token and once after the target's own,
so that whatever differs is the work of this one token. The same is done with a control: the target's runner-up
put in where the rule was not indifferent, so that it would have refused it. All at temperature 0, where two
continuations differ for no other reason.

n events, H distances. Oracle: tests/lab/evaluate/test_compounding.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mars_jax import drafters, verify
from mars_jax.core.rule import LoadedRule
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.benchmark.arms import MARS
from mars_jax.lab.evaluate.scoring import scores
from mars_jax.lab.evaluate.tasks.problems import UNJUDGED, Problem
from mars_jax.lab.studies.refusals import check_low, low_nodes
from mars_jax.lab.ticking import Speed
from mars_jax.serve import requests as request
from mars_jax.serve.likelihood import score as likelihood
from mars_jax.serve.requests import Completion
from mars_jax.serve.rows import Row, RowFile
from mars_jax.serve.session import Batch, Session
from mars_jax.specs import RuleChoice


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One text of the relaxed rule."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    relaxed: tuple[bool, ...]  # of each token

    @classmethod
    def of(cls, row: Row) -> Decoded:
        """From its row."""
        return cls(tuple(row["prompt"]), tuple(row["tokens"]), tuple(row["relaxed"]))


@dataclasses.dataclass(frozen=True)
class Event:
    """One token in whose place the target would have said another, and both continuations from there."""

    problem: int
    control: bool  # False: relaxed by the rule; True: put in where it would have refused
    place: int  # of the token in its text
    left: int  # tokens of the text after it
    ours: tuple[int, ...]  # the token, then its strict continuation
    strict: tuple[int, ...]  # strict continuation of the text before it
    our_log_p: tuple[float, ...]
    strict_log_p: tuple[float, ...]
    our_score: float | None
    strict_score: float | None


def relaxed_texts(batch: Batch, speed: Speed) -> list[Decoded]:
    """Decode a batch step by step, to see which tokens were relaxed."""
    said: list[list[tuple[int, bool]]] = [[] for _ in batch.requests]
    done = []
    for event in batch.session.stream(batch.requests):
        kinds = [kind == "relaxed" for kind, _ in event.pieces]
        said[event.row] += zip(event.tokens, kinds, strict=True)
        done += [] if event.completion is None else [event.completion]
    _count(speed, done)
    return [
        Decoded(r.prompt_tokens, tuple(t for t, _ in tokens), tuple(k for _, k in tokens))
        for r, tokens in zip(batch.requests, said, strict=True)
    ]


def study(
    target: Pretrained,
    drafter: drafters.LoadedDrafter,
    problems: Sequence[Problem],
    *,
    rule: RuleChoice = MARS,
    chat: bool = False,
    max_new_tokens: int = 256,
    horizon: int = 48,
    per_text: int = 2,
    batch_size: int = 8,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
    rows: RowFile | None = None,
) -> tuple[list[Decoded], list[Event]]:
    """Decode problems with the relaxed rule, and branch off at some of the tokens that it relaxed.

    Args:
      target, drafter: as for `generate`.
      problems: of one task.
      rule: by name, over `verify.exact`.
      chat: put questions through the chat template.
      max_new_tokens: of a text, in every branch.
      horizon: tokens of a continuation that is not scored; scored ones go on to their end.
      per_text: events of each kind, at random places, in one text.
      batch_size: rows that decode side by side.
      seed: of the places.
      progress: `(what, done, of)`.
      rows: file to keep what was decoded in, where a run with the same arguments that was killed goes on.

    Raises:
      MarsError: as `generate`; a rule that does not say where it relaxes, see `check_low`.
    """
    tick = progress or (lambda what, done, of: None)
    prompts = [prompt_tokens(target, problem, chat=chat) for problem in problems]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed}
    requests = request.make_requests(target, prompts, **options)
    made = verify.load(rule.spec, target, **rule.settings)
    check_low(made.rule)
    strictly = Session(target=target, drafter=drafter, batch_size=batch_size)
    texts: list[Decoded] = []
    speed = Speed()
    for batch in strictly.using(made).batches(requests):
        make = functools.partial(relaxed_texts, batch, speed)
        first = len(texts)
        keys = [
            {"what": "text", "task": problems[i].task, "problem": i}
            for i in range(first, first + len(batch.requests))
        ]
        texts += _kept(rows, keys, make, dataclasses.asdict, Decoded.of)
        tick(f"texts, {speed.describe()}", len(texts), len(requests))
    # One more token of each branch than the distances that are looked at.
    places = _places(target, texts, made, per_text, np.random.default_rng(seed))
    branches = []
    for problem, control, place, runner_up in places:
        text = texts[problem]
        before = (*text.prompt, *text.tokens[:place])
        token = runner_up if control else text.tokens[place]
        left = max_new_tokens - place
        length = min(left, horizon) if problems[problem].metric in UNJUDGED else left
        branches += [((*before, token), length - 1), (before, length)]
    done = continue_strictly(strictly, branches, tick, rows=rows)
    pairs = [
        ((branch[0][-1], *tokens) if i % 2 == 0 else tokens)
        for i, (branch, tokens) in enumerate(zip(branches, done, strict=True))
    ]
    whole = [(*branch[0], *tokens) for branch, tokens in zip(branches, done, strict=True)]
    starts = [len(texts[p].prompt) + place for p, _, place, _ in places for _ in range(2)]
    log_p = [s.log_p[at - 1 :].tolist() for s, at in zip(likelihood(target, whole), starts, strict=True)]
    events = []
    for i, (problem, control, place, _) in enumerate(places):
        text = texts[problem]
        ours, strict = pairs[2 * i], pairs[2 * i + 1]
        worth = [_worth(target, problems[problem], (*text.tokens[:place], *tail)) for tail in (ours, strict)]
        events.append(
            Event(
                problem, control, place, len(text.tokens) - place - 1, ours, strict,
                tuple(log_p[2 * i]), tuple(log_p[2 * i + 1]), *worth,
            )
        )  # fmt: skip
    return texts, events


def _places(
    target: Pretrained, texts: Sequence[Decoded], rule: LoadedRule, per_text: int, rng: np.random.Generator
) -> list[tuple[int, bool, int, int]]:
    """(problem, control, place, runner-up) of the events. A control stands where the text says what the target would,
    the rule is not indifferent, and neither of the two best tokens is a stop token."""
    chosen = []
    whole = [(*text.prompt, *text.tokens) for text in texts]
    told = zip(texts, likelihood(target, whole), low_nodes(target, rule, whole), strict=True)
    for problem, (text, s, indifferent) in enumerate(told):
        relaxed = [i for i, was in enumerate(text.relaxed) if was]
        at = np.arange(len(text.tokens)) + len(text.prompt) - 1
        own = s.best[at] == np.asarray(text.tokens)
        stops = np.isin(s.best[at], target.stop_tokens) | np.isin(s.second[at], target.stop_tokens)
        refused = np.flatnonzero(~indifferent[at] & own & ~stops).tolist()
        for control, places in ((False, relaxed), (True, refused if relaxed else [])):
            picked = rng.choice(places, min(per_text, len(places)), replace=False) if places else []
            chosen += [(problem, control, int(i), int(s.second[at[i]])) for i in picked]
    return chosen


def continue_strictly(
    session: Session,
    branches: Sequence[tuple[tuple[int, ...], int]],
    tick: Callable[[str, int, int], None] = lambda what, done, of: None,
    *,
    rows: RowFile | None = None,
) -> list[tuple[int, ...]]:
    """Strict greedy continuations of (tokens, length); of length 0 where no token is left or the text has ended.

    The session's rule is `verify.exact`.
    """
    done: list[tuple[int, ...]] = [()] * len(branches)
    target, size = session.target, session.batch_size
    context = target.config.max_positions
    going = [
        i
        for i, (tokens, length) in enumerate(branches)
        if length > 0 and tokens[-1] not in target.stop_tokens and len(tokens) < context
    ]
    # Rows of one length bucket decode together.
    going.sort(key=lambda i: len(branches[i][0]) + branches[i][1])
    speed = Speed()
    for first in range(0, len(going), size):
        group = going[first : first + size]
        keys = [{"what": "branch", "branch": i, "length": branches[i][1]} for i in group]
        make = functools.partial(_continue, session, [branches[i] for i in group], speed)
        found = _kept(rows, keys, make, lambda tokens: {"tokens": tokens}, lambda row: tuple(row["tokens"]))
        for i, tokens in zip(group, found, strict=True):
            done[i] = tokens
        tick(f"branches, {speed.describe()}", first + len(group), len(going))
    return done


def _continue(
    session: Session, branches: Sequence[tuple[tuple[int, ...], int]], speed: Speed
) -> list[tuple[int, ...]]:
    """One batch of `continue_strictly`."""
    requests = [
        request.make_requests(session.target, [tokens], max_new_tokens=length)[0]
        for tokens, length in branches
    ]
    done = session.run(requests)
    _count(speed, done)
    return [tuple(c.tokens) for c in done]


def _count(speed: Speed, done: Sequence[Completion]) -> None:
    """A batch, whose rows were decoded side by side."""
    metrics = request.total(done)
    seconds = max(completion.seconds for completion in done)
    speed.add(emitted=metrics.emitted, steps=metrics.steps, seconds=seconds)


def _kept(
    rows: RowFile | None,
    keys: Sequence[Row],
    make: Callable[[], Sequence[Any]],
    to_row: Callable[[Any], Row],
    of_row: Callable[[Row], Any],
) -> list[Any]:
    """A batch of values, each a row of the file where there is one."""
    if rows is None:
        return list(make())

    def made() -> list[Row]:
        return [key | to_row(value) for key, value in zip(keys, make(), strict=True)]

    return [of_row(row) for row in rows.batch(keys, made)]


def _worth(target: Pretrained, problem: Problem, tokens: Sequence[int]) -> float | None:
    """The score of a text, where a text has one of its own and no program must run for it."""
    if problem.metric in (*UNJUDGED, "bleu", "pass@1"):
        return None
    numbers = scores.score(problem, target.decode(tokens))
    return None if numbers is None else numbers[0]
