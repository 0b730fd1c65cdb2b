"""Error cascades: what one relaxed token does to the text behind it.

At a relaxed token the text is continued twice by the strict rule, once behind that token and once behind the target's
own, so that whatever differs is the work of this one token. The same is done with a control: the target's runner-up
put in where the rule was not indifferent, so that it would have refused it. All at temperature 0, where two
continuations differ for no other reason.

n events, H distances. Oracle: tests/evaluate/test_compounding.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mars_jax import drafters, verify
from mars_jax.core.types import LoadedRule
from mars_jax.evaluate.answers import prompt_tokens
from mars_jax.evaluate.benchmark.arms import MARS
from mars_jax.evaluate.scoring import scores
from mars_jax.evaluate.scoring.likelihood import score as likelihood
from mars_jax.evaluate.studies.refusals import check_low, low_nodes
from mars_jax.evaluate.tasks.problems import UNJUDGED, Problem
from mars_jax.pretrained import Pretrained
from mars_jax.serve import requests as request
from mars_jax.serve.generate import generate_stream, run_batch
from mars_jax.serve.requests import Request
from mars_jax.specs import RuleChoice

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One text of the relaxed rule."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    relaxed: tuple[bool, ...]  # of each token


@dataclasses.dataclass(frozen=True)
class Event:
    """One token in whose place the target would have said another, and both continuations from there."""

    problem: int
    control: bool  # False: relaxed by the rule; True: put in where it would have refused
    place: int  # of the token in its text
    left: int  # tokens of the text behind it
    ours: tuple[int, ...]  # strict continuation behind the token, which comes first
    strict: tuple[int, ...]  # strict continuation of the text before it
    our_log_p: tuple[float, ...]
    strict_log_p: tuple[float, ...]
    our_score: float | None
    strict_score: float | None


def relaxed_texts(
    target: Pretrained, drafter: drafters.LoadedDrafter, requests: Sequence[Request], rule: Any, rows: int
) -> list[Decoded]:
    """Decode step by step, to see which tokens were relaxed."""
    texts: list[Decoded] = []
    for group in request.batches(requests, rows):
        said: list[list[tuple[int, bool]]] = [[] for _ in group]
        for event in generate_stream(target, drafter, group, verify=rule, rows=rows):
            kinds = [kind == "relaxed" for kind, _ in event.pieces]
            said[event.row] += zip(event.tokens, kinds, strict=True)
        texts += [
            Decoded(r.prompt_tokens, tuple(t for t, _ in tokens), tuple(k for _, k in tokens))
            for r, tokens in zip(group, said, strict=True)
        ]
    return texts


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

    Raises:
      MarsError: as `generate`; a rule that does not say where it relaxes, see `check_low`.
    """
    tick = progress or (lambda what, done, of: None)
    prompts = [prompt_tokens(target, problem, chat=chat) for problem in problems]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed}
    requests = request.make_requests(target, prompts, **options)
    made = verify.load(rule.spec, target, **rule.settings)
    check_low(made.rule)
    texts: list[Decoded] = []
    for first in range(0, len(requests), batch_size):
        texts += relaxed_texts(target, drafter, requests[first : first + batch_size], made, batch_size)
        tick("texts", len(texts), len(requests))
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
    done = continue_strictly(target, drafter, branches, batch_size, tick)
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
    target: Pretrained,
    drafter: drafters.LoadedDrafter,
    branches: Sequence[tuple[tuple[int, ...], int]],
    rows: int,
    tick: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> list[tuple[int, ...]]:
    """Strict greedy continuations of (tokens, length); of length 0 where no token is left or the text has ended."""
    done: list[tuple[int, ...]] = [()] * len(branches)
    context = target.config.max_positions
    going = [
        i
        for i, (tokens, length) in enumerate(branches)
        if length > 0 and tokens[-1] not in target.stop_tokens and len(tokens) < context
    ]
    # Rows of one length bucket decode together.
    going.sort(key=lambda i: len(branches[i][0]) + branches[i][1])
    for first in range(0, len(going), rows):
        group = going[first : first + rows]
        requests = [
            request.make_requests(target, [branches[i][0]], max_new_tokens=branches[i][1])[0] for i in group
        ]
        for i, c in zip(
            group, run_batch(target, drafter, requests, verify=verify.exact(), rows=rows), strict=True
        ):
            done[i] = tuple(c.tokens)
        tick("branches", first + len(group), len(going))
    return done


def _worth(target: Pretrained, problem: Problem, tokens: Sequence[int]) -> float | None:
    """The score of a text, where a text has one of its own and no program must run for it."""
    if problem.metric in (*UNJUDGED, "bleu", "pass@1"):
        return None
    numbers = scores.score(problem, target.decode(tokens))
    return None if numbers is None else numbers[0]


def aligned(strict: Sequence[int], ours: Sequence[int]) -> np.ndarray:
    """bool[len(ours)]: tokens that the strict continuation has too, in the same order, if not in the same place.

    >>> aligned([1, 2, 3, 4], [9, 1, 2, 4]).tolist()
    [False, True, True, True]
    """
    found = np.zeros(len(ours), bool)
    for block in difflib.SequenceMatcher(None, strict, ours, autojunk=False).get_matching_blocks():
        found[block.b : block.b + block.size] = True
    return found


def curves(events: Sequence[Event], horizon: int, *, seed: int = 0) -> dict[str, Any]:
    """What the events say by distance, 1 being the first token behind the one that differs.

    Returns:
      `same_place`, `same_order` and `surprise`: mean, low and high (95%, bootstrap over problems) at each distance.
      Distances behind the end of both continuations are left out; surprise is -log p under the target in nats, ours
      less the strict one's. `grows` has the change of each between the first and the last third of the distances,
      and `score` the score that the token costs, where there is one.
    """
    names = ("same_place", "same_order", "surprise")
    values = {name: np.full((len(events), horizon), np.nan) for name in names}
    for row, event in enumerate(events):
        ours, strict = event.ours[1:], event.strict[1:]
        order = aligned(strict, ours)
        for d in range(horizon):
            here, there = d < len(ours), d < len(strict)
            if not here and not there:
                continue
            values["same_place"][row, d] = here and there and ours[d] == strict[d]
            if here:
                values["same_order"][row, d] = order[d]
            if here and there:
                values["surprise"][row, d] = event.strict_log_p[d + 1] - event.our_log_p[d + 1]
    groups = np.asarray([event.problem for event in events])
    third = max(1, horizon // 3)
    report: dict[str, Any] = {"events": len(events), "problems": len(set(groups.tolist()))}
    for name in names:
        report[name] = interval(values[name], groups, seed=seed)
    report["grows"] = {
        name: interval(
            (_mean(values[name][:, -third:]) - _mean(values[name][:, :third]))[:, None], groups, seed=seed
        )
        for name in names
    }
    scored = [e for e in events if e.our_score is not None and e.strict_score is not None]
    report["score"] = None
    if scored:
        lost = np.asarray([[e.strict_score - e.our_score] for e in scored])  # pyright: ignore
        report["score"] = interval(lost, np.asarray([e.problem for e in scored]), seed=seed) | {
            "strict": float(np.mean([e.strict_score for e in scored])),  # pyright: ignore
            "changed": float(np.mean([e.strict_score != e.our_score for e in scored])),
        }
    return report


def _mean(values: np.ndarray) -> np.ndarray:
    """f64[n, k] -> f64[n], NaN where a row has none."""
    count = np.sum(~np.isnan(values), axis=1)
    return np.where(count > 0, np.nansum(values, axis=1) / np.maximum(count, 1), np.nan)


def interval(values: np.ndarray, groups: np.ndarray, *, seed: int = 0) -> dict[str, list[float | None]]:
    """Mean and 95% interval of each column of f64[n, k], NaN left out, by the bootstrap over groups i[n]."""
    _, index = np.unique(groups, return_inverse=True)
    count = int(index.max(initial=-1)) + 1
    known = ~np.isnan(values)
    sums, sizes = np.zeros((count, values.shape[1])), np.zeros((count, values.shape[1]))
    np.add.at(sums, index, np.where(known, values, 0.0))
    np.add.at(sizes, index, known)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (weights @ sums) / (weights @ sizes)
        mean = sums.sum(axis=0) / sizes.sum(axis=0)
    found = {"mean": mean.tolist(), "low": [], "high": []}
    for column in means.T:
        finite = column[np.isfinite(column)]
        low, high = np.quantile(finite, [0.025, 0.975]) if len(finite) else (np.nan, np.nan)
        found["low"].append(float(low))
        found["high"].append(float(high))
    return {k: [None if np.isnan(x) else float(x) for x in xs] for k, xs in found.items()}


def relapse(texts: Sequence[Decoded], horizon: int, *, seed: int = 0) -> dict[str, Any]:
    """How often a token is relaxed at each distance behind a relaxed one, over how often any is: 1 is no memory."""
    hits, chances = np.zeros((len(texts), horizon)), np.zeros((len(texts), horizon))
    for row, text in enumerate(texts):
        flags = np.asarray(text.relaxed, bool)
        for d in range(1, min(horizon, len(flags) - 1) + 1):
            hits[row, d - 1] = np.sum(flags[:-d] & flags[d:])
            chances[row, d - 1] = np.sum(flags[:-d])
    relaxed = np.asarray([sum(t.relaxed) for t in texts], np.float64)
    tokens = np.asarray([len(t.tokens) for t in texts], np.float64)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(texts), np.full(len(texts), 1 / len(texts)), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = (
            (weights @ hits) / (weights @ chances) / ((weights @ relaxed) / (weights @ tokens))[:, None]
        )
        mean = hits.sum(axis=0) / chances.sum(axis=0) / (relaxed.sum() / tokens.sum())
    found = {"mean": mean, "low": [], "high": []}
    for column in resampled.T:
        finite = column[np.isfinite(column)]
        bounds = np.quantile(finite, [0.025, 0.975]) if len(finite) else (np.nan, np.nan)
        found["low"].append(bounds[0])
        found["high"].append(bounds[1])
    return {
        "share": float(relaxed.sum() / tokens.sum()),
        **{k: [None if not np.isfinite(x) else float(x) for x in xs] for k, xs in found.items()},
    }
