"""The texts of the strict rule and of the relaxed one beside each other, with the kind of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.benchmark.margins import Observed
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.serve.requests import Request
from mars_jax.serve.text import RowText

PROBLEMS = 8
"""Problems of a task whose texts are kept, in their first turn."""


def as_json(
    target: Pretrained,
    problems: Sequence[Problem],
    requests: Sequence[Request],
    said: Mapping[str, Observed],
) -> list[dict[str, Any]]:
    """For texts.json: of `problems`, which the first `requests` are of, `id`, `prompt`, and by arm `tokens`, their
    `kinds` and their `pieces`, the text that each completes; joined they are the text."""
    found = []
    for number, (problem, request) in enumerate(zip(problems, requests, strict=False)):
        arms = {
            name: {
                "tokens": seen.tokens[number],
                "kinds": seen.kinds[number],
                "pieces": pieces(target, request, seen.tokens[number]),
            }
            for name, seen in said.items()
        }
        found.append({"id": problem.id, "prompt": problem.turns[0], "arms": arms})
    return found


def pieces(target: Pretrained, request: Request, tokens: Sequence[int]) -> list[str]:
    """The text that each token completes; "" where a character goes on."""
    text = RowText(target, request)
    return [text.feed(token, last=place == len(tokens) - 1) for place, token in enumerate(tokens)]
