"""Prompts and head shared by the measurements of SmolLM2."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import mars_jax as mj

HEAD = "eagle:smollm2/eagle3"


def prompts(target: mj.Pretrained, path: Path, count: int, longest: int) -> list[tuple[int, list[int]]]:
    """Return (position in the file, tokens) of the first `count` questions whose chats have up to `longest` tokens."""
    with lzma.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    questions = [row["question"] if "question" in row else row["turns"][0] for row in rows]
    encoded = ((position, target.encode(question, chat=True)) for position, question in enumerate(questions))
    return [(position, ids) for position, ids in encoded if len(ids) <= longest][:count]
