"""`mars-jax distill sprinter`, `via_sd` and `diversed`: the learned parts of systems of single papers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax import contrib
from mars_jax.contrib.drafters import sprinter_training, via_sd_training
from mars_jax.contrib.drafters.system_files import NGRAM, System, save_system
from mars_jax.contrib.rules import diversed_training
from mars_jax.contrib.teaching import Batch
from mars_jax.core.errors import MarsError, say
from mars_jax.core.home import expanded
from mars_jax.hub.pretrained import Pretrained, check_same_vocabulary
from mars_jax.lab.evaluate.scoring.scores import score
from mars_jax.lab.evaluate.tasks.arithmetic import read_arithmetic
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.training import data
from mars_jax.lab.training.loop import fit
from mars_jax.models.config import ModelConfig

LEFT_OUT, EVALUATIONS = 0.45, 128


def draft_name(name: str, output: Path) -> str:
    """Return the name of a model in config.json of `output`: the given one, or a path relative to the output."""
    path = expanded(name)
    if name == NGRAM or not path.is_dir():
        return name
    relative = os.path.relpath(path.resolve(), output.resolve())
    if relative.startswith(".."):
        raise MarsError(
            f"--from is '{name}', which a system in '{output}' could not name once it is moved: give a name of the "
            "hub's or of the package's, or copy the model to a directory within --output when it is there."
        )
    return relative


def _batches(args: argparse.Namespace, target: Pretrained, documents: Sequence[str]) -> list[Batch]:
    stream = data.stream(documents, target.tokenizer.backend_tokenizer)
    rows = max(2, args.step_tokens // args.length)
    batches = data.batches([stream], rows=rows, length=args.length, seed=args.seed)
    return [batches[i] for i in range(max(2, round(args.tokens / args.step_tokens)))]


def _sprinter(
    args: argparse.Namespace, target: Pretrained, small: Pretrained, documents: Sequence[str], work: Path
) -> None:
    check_same_vocabulary(target, small)
    batches = _batches(args, target, documents)
    examples = jax.jit(
        lambda teacher, params, batch, key: sprinter_training.examples(
            target.model, teacher, small.model, params, batch, key
        )
    )
    keys = jax.random.split(jax.random.key(args.seed), len(batches))
    parts = [
        jax.device_get(examples(target.params, small.params, batch, key))
        for batch, key in zip(batches, keys, strict=True)
    ]
    held_out = max(1, len(parts) // 8)
    training = sprinter_training.training(sprinter_training.flattened(parts[:-held_out]), seed=args.seed)
    params = jax.device_get(fit(training, work, description="classifier"))
    test = sprinter_training.flattened(parts[-held_out:])
    figures = {f"at_{c}": sprinter_training.figures(test, params, c) for c in (0.3, 0.5, 0.7, 0.9)}
    say(f"held out: {figures}")
    save_system(args.output, System(name="sprinter", draft=draft_name(args.first, args.output)), params)


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
    found = via_sd_training.search(
        target.model,
        target.params,
        _batches(args, target, documents),
        left_out=args.left_out or LEFT_OUT,
        evaluations=EVALUATIONS,
        seed=args.seed,
        log=work / "masks.jsonl",
    )
    out = 2 * len(found.mask) - sum(map(sum, found.mask))
    say(
        f"without {out} of {2 * len(found.mask)} sublayers: KL {found.kl:.3f} nats a token, the same best token "
        f"{found.same:.1%}"
    )
    name = draft_name(args.first or NGRAM, args.output)
    save_system(args.output, System(name="via_sd", draft=name, layers=found.mask))


def _diversed(
    args: argparse.Namespace, target: Pretrained, small: Pretrained, documents: Sequence[str], work: Path
) -> None:
    check_same_vocabulary(target, small)
    problems = rewarded(args.task)
    prompts = target.encode_many([p.turns[0] for p in problems], chat=True)

    def reward(number: int, text: str) -> float:
        counts = score(problems[number], text)
        return float(np.asarray(counts)[0]) if counts else 0.0

    head = fit(
        diversed_training.training(target, small, seed=args.seed),
        work,
        teacher=(target.params, small.params),
        prepare=diversed_training.rollouts(target, small, prompts, reward, seed=args.seed),
        save_every=1,
        description="diversed",
    )
    contrib.save(args.output, jax.device_get(head), "diversed")


SYSTEMS: dict[str, Callable[[argparse.Namespace, Pretrained, Any, Sequence[str], Path], None]] = {
    "sprinter": _sprinter,
    "via_sd": _via_sd,
    "diversed": _diversed,
}
"""Functions of (flags, target, small model, documents, --work) that train each system and write it to --output.

Raises:
  MarsError: the small model has another vocabulary, there is too little text, or a task without rewards.
"""


def rewarded(task: str | None) -> list[Problem]:
    """Return the problems of `--task`, by default those of arithmetic.

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
