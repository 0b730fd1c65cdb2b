"""Text for `distill` to train on: documents, or texts that the target writes itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mars_jax import drafters
from mars_jax.cli.progress import progress
from mars_jax.core.errors import MarsError
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.training import data
from mars_jax.serve.generation import generate
from mars_jax.serve.rows import RowFile, write_whole


def training_text(
    target: Pretrained, documents: Sequence[str], work: Path, *, write: int | None, length: int, seed: int
) -> data.Stream:
    """Return the tokens of documents, or of `write` texts that the target writes and that are kept in `work`.

    Raises:
      MarsError: see `write_texts`; or there is no text.
    """
    tokenize = target.tokenizer.backend_tokenizer
    if write is None:
        return data.stream(documents, tokenize)
    written = work / "written.txt"
    if not written.exists():
        rows = work / "written.jsonl"
        texts = write_texts(target, documents, write, length=length, seed=seed, rows=rows)
        write_whole(written, f"\n{data.SEPARATOR}\n".join(texts) + "\n")
    return data.stream(list(data.documents(written)), tokenize)


GROUP = 4
"""Batches of texts between two writes to the file."""


def write_answers(
    target: Pretrained,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    temperatures: Sequence[float],
    seed: int,
    batch_size: int = 64,
) -> list[list[int]]:
    """Return chat prompts with the target's answers, of up to `length` tokens together; the temperatures take turns."""
    result = generate(
        target,
        "none",
        prompts,
        chat=True,
        temperature=[temperatures[i % len(temperatures)] for i in range(len(prompts))],
        seed=[(seed + i) % 2**32 for i in range(len(prompts))],
        max_new_tokens=[length - len(ids) for ids in prompts],
        batch_size=batch_size,
    )
    return [[*prompt, *ids] for prompt, ids in zip(prompts, result.tokens, strict=True)]


def write_texts(
    target: Pretrained,
    documents: Sequence[str],
    count: int,
    *,
    length: int,
    seed: int,
    rows: Path,
    batch_size: int = 32,
) -> list[str]:
    """Return `count` texts of up to `length` tokens, with which the target continues the first 16 tokens of documents.

    The file `rows` keeps them, so that a killed run continues.

    Raises:
      MarsError: no document has 16 tokens, or `rows` is the file of another run.
    """
    # Cut long documents before they are tokenized: 16 tokens have fewer than 2,000 characters.
    begun = (target.encode(text[:2000])[:16] for text in documents)
    prompts = [ids for ids in begun if len(ids) == 16][:count]
    if not prompts:
        raise MarsError("no document has 16 tokens to begin a text with: give longer ones.")
    drafter = drafters.load("ngram", target)
    texts: list[str] = []

    def write(numbers: Sequence[int]) -> list[dict[str, Any]]:
        chosen = [prompts[i % len(prompts)] for i in numbers]
        result = generate(
            target,
            drafter,
            chosen,
            temperature=1.0,
            seed=[(seed + i) % 2**32 for i in numbers],
            max_new_tokens=length - 16,
            batch_size=batch_size,
        )
        return [
            {"number": i, "text": target.decode([*prompt, *ids])}
            for i, prompt, ids in zip(numbers, chosen, result.tokens, strict=True)
        ]

    with contextlib.closing(RowFile(rows, {}, flag="--work")) as file, progress("texts") as show:
        file.start()
        # Decode several batches at a time, so that rows refill.
        for first in range(0, count, GROUP * batch_size):
            numbers = range(first, min(first + GROUP * batch_size, count))
            keys = [{"number": i} for i in numbers]
            texts += [row["text"] for row in file.batch(keys, functools.partial(write, numbers))]
            show(len(texts), count, "")
    return texts
