"""`mars-jax distill sprinter`, `via_sd` and `diversed`: what systems need that ask the target less often."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax import contrib, hub
from mars_jax.contrib.drafters.system_files import NGRAM, System, save_system
from mars_jax.core.errors import MarsError
from mars_jax.core.home import expanded
from mars_jax.core.rule import LoadedRule
from mars_jax.drafters import LoadedDrafter, language_model
from mars_jax.hub.pretrained import Pretrained, check_same_vocabulary
from mars_jax.lab.evaluate.scoring.scores import score
from mars_jax.lab.evaluate.tasks.arithmetic import read_arithmetic
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.training import data, diversed_training, slim, sprinter_training
from mars_jax.models.config import ModelConfig
from mars_jax.serve.generation import generate

LEFT_OUT, EVALUATIONS, UPDATES = 0.45, 128, 40
CHAIN, ROLLOUTS, ANSWER_TOKENS = 5, 48, 128
_HELD_OUT = 8  # of so many batches the last one is


def open_small(args: argparse.Namespace) -> Pretrained | None:
    """The model that `--from` names; None for the ngram of via_sd, which has no weights."""
    return None if args.kind == "via_sd" and args.first == NGRAM else hub.load(args.first)


def draft_name(name: str, output: Path) -> str:
    """The name of a model in config.json of `output`: the one that was given, or a path relative to the output."""
    path = expanded(name)
    if not path.is_dir():
        return name
    relative = os.path.relpath(path.resolve(), output.resolve())
    if relative.startswith(".."):
        raise MarsError(
            f"--from is '{name}', which a system in '{output}' could not name once it is moved: give a name of the "
            "hub's or of the package's, or copy the model to a directory within --output when it is there."
        )
    return relative


def _batches(args: argparse.Namespace, target: Pretrained, documents: Sequence[str]) -> list[data.Batch]:
    stream = data.stream(documents, target.tokenizer.backend_tokenizer)
    count = max(2, round(args.tokens / args.step_tokens))
    rows = max(2, args.step_tokens // args.length)
    mixture = data.Mixture([stream], rows=rows, length=args.length, seed=args.seed)
    return [mixture.batch(i) for i in range(count)]


def _sprinter(
    args: argparse.Namespace, target: Pretrained, small: Pretrained, documents: Sequence[str], work: Path
) -> None:
    check_same_vocabulary(target, small)
    batches = _batches(args, target, documents)
    read = jax.jit(
        lambda teacher, params, batch, key: sprinter_training.examples(
            target.model, teacher, small.model, params, batch, key
        )
    )
    keys = jax.random.split(jax.random.key(args.seed), len(batches))
    parts = []
    for i, batch in enumerate(batches):
        parts.append(jax.device_get(read(target.params, small.params, batch, keys[i])))
        if (i + 1) % 16 == 0:
            print(f"{i + 1} of {len(batches)} batches read", file=sys.stderr, flush=True)
    held_out = max(1, len(parts) // _HELD_OUT)
    arrays = sprinter_training.train(sprinter_training.flattened(parts[:-held_out]), work, seed=args.seed)
    test = sprinter_training.flattened(parts[-held_out:])
    figures = {f"at_{c}": sprinter_training.figures(test, arrays, c) for c in (0.3, 0.5, 0.7, 0.9)}
    print(f"held out: {figures}", file=sys.stderr)
    save_system(args.output, System(name="sprinter", draft=draft_name(args.first, args.output)), arrays)


def _via_sd(
    args: argparse.Namespace,
    target: Pretrained,
    small: Pretrained | None,
    documents: Sequence[str],
    work: Path,
) -> None:
    if small is not None:
        check_same_vocabulary(target, small)
    if not isinstance(target.config, ModelConfig) or target.model.with_layers is None:
        raise MarsError(
            f"'{target.name}' cannot leave out layers: give a checkpoint of this library's models."
        )
    found = slim.search(
        target.model,
        target.params,
        _batches(args, target, documents),
        left_out=args.left_out or LEFT_OUT,
        evaluations=args.evaluations or EVALUATIONS,
        seed=args.seed,
        log=work / "masks.jsonl",
    )
    out = 2 * len(found.mask) - sum(map(sum, found.mask))
    print(
        f"without {out} of {2 * len(found.mask)} sublayers: KL {found.kl:.3f} nats a token, the same best token "
        f"{found.same:.1%}",
        file=sys.stderr,
    )
    draft: Any = args.first or NGRAM
    name = draft if draft == NGRAM else draft_name(draft, args.output)
    save_system(args.output, System(name="via_sd", draft=name, layers=found.mask))


def _diversed(
    args: argparse.Namespace, target: Pretrained, small: Pretrained, documents: Sequence[str], work: Path
) -> None:
    check_same_vocabulary(target, small)
    problems = rewarded(args.task)
    prompts = target.encode_many([p.turns[0] for p in problems], chat=True)
    vocab = target.config.vocab_size
    drafter = language_model(small.model, CHAIN, sample=True, vocab_size=vocab)
    room = max(map(len, prompts)) + ANSWER_TOKENS

    def rollouts(head: Any, step: int) -> diversed_training.Rollouts:
        chosen = [(step * ROLLOUTS + i) % len(problems) for i in range(ROLLOUTS)]
        found = generate(
            target,
            LoadedDrafter(drafter, small.params),
            [prompts[i] for i in chosen],
            verify=LoadedRule(contrib.diversed(), head),
            temperature=1.0,
            seed=[(args.seed + step * ROLLOUTS + i) % 2**32 for i in range(ROLLOUTS)],
            max_new_tokens=ANSWER_TOKENS,
            batch_size=ROLLOUTS,
        )
        tokens, written = np.zeros((ROLLOUTS, room), np.int32), np.zeros((ROLLOUTS, room), bool)
        rewards = []
        for row, (index, made) in enumerate(zip(chosen, found.tokens, strict=True)):
            ids = [*prompts[index], *made]
            tokens[row, : len(ids)] = ids
            written[row, len(prompts[index]) : len(ids)] = True
            counts = score(problems[index], found.text[row])
            rewards.append(float(np.asarray(counts)[0]) if counts else 0.0)
        return diversed_training.Rollouts(tokens, written, np.asarray(rewards, np.float32))

    models = diversed_training.Models(target.model, target.params, small.model, small.params)
    head = diversed_training.train(
        models,
        rollouts,
        work,
        hidden_size=target.config.hidden_size,
        draft_hidden_size=small.config.hidden_size,
        steps=args.updates or UPDATES,
        seed=args.seed,
    )
    contrib.save(args.output, head, "diversed")


SYSTEMS: dict[str, Callable[..., None]] = {"sprinter": _sprinter, "via_sd": _via_sd, "diversed": _diversed}
"""Functions that make each system and write it to --output.

They take the flags, the target, what `open_small` gave, the documents and --work.

Raises:
  MarsError: the small model has another vocabulary, there is too little text, or a task without rewards.
"""


def rewarded(task: str | None) -> list[Problem]:
    """The problems of `--task`, by default those of arithmetic.

    Raises:
      MarsError: there is no such task or file, or its answers have no rewards.
    """
    name, _, path = (task or "arithmetic").partition("=")
    if name == "arithmetic" and not path:
        return read_arithmetic("train")
    problems = read(name, path or None, chat=True)
    metrics = ("final_answer", "last_number", "rouge_l")
    if any(p.metric not in metrics for p in problems):
        raise MarsError(
            f"--task {name} rewards no single answer: choose one whose metric is {', '.join(metrics)}."
        )
    return problems
