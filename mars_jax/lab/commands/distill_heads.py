"""The heads and small models that `distill` trains: how each kind begins, and how it is written."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mars_jax import contrib, hub
from mars_jax.contrib.drafters.medusa_files import save_medusa
from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.pretrained import Pretrained, check_same_vocabulary
from mars_jax.lab.training import block_training, data, distillation, head_training
from mars_jax.lab.training.distillation import Apprentice
from mars_jax.lab.training.objectives import divergence
from mars_jax.models.eagle_head import EagleConfig


class Head(NamedTuple):
    """A head that has been trained before, and its params in float32."""

    config: EagleConfig
    params: PyTree


def open_head(name_or_path: str, target: Pretrained) -> Head:
    """Load the head of `--from`.

    Raises:
      MarsError: as `hub.load_eagle`, or it is no EAGLE-3 head.
    """
    config, params = hub.load_eagle(name_or_path, target.config, target.params, dtype="float32")
    if config.version != 3:
        raise MarsError(
            f"--from {name_or_path} is an EAGLE-1 head: name an EAGLE-3 head, or leave it out to begin a new one."
        )
    return Head(config, params)


def layers_of(given: str | None) -> tuple[int, ...] | None:
    """The layer numbers of `--feature-layers`, None where it is not given.

    Raises:
      MarsError: no numbers.

    >>> layers_of("1,14,26")
    (1, 14, 26)
    """
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise MarsError(f"--feature-layers is {given}: expected layer numbers such as 1,15,28.") from None


def feature_layers(args: argparse.Namespace, target: Pretrained, head: Head | None) -> tuple[int, ...]:
    """The layers of the target that an EAGLE-3 head reads."""
    if head is not None:
        return head.config.feature_layers
    return layers_of(args.feature_layers) or head_training.feature_layers(target.config)


def chosen_vocabulary(
    args: argparse.Namespace, target: Pretrained, texts: Sequence[data.Stream]
) -> np.ndarray | None:
    """The draft vocabulary of `--draft-vocab`, ids i32[W]; None where it is all tokens."""
    vocab = target.config.vocab_size
    if args.draft_vocab in (None, vocab):
        return None
    return distillation.draft_vocabulary(texts, args.draft_vocab, vocab, target.stop_tokens)


def _eagle3(args: argparse.Namespace, target: Pretrained, first: Head | None, ids: Any) -> Apprentice:
    steps, loss = args.steps_ahead or 5, divergence(args.loss)
    if first is not None:
        return head_training.eagle3_again(
            target.config, first.config, first.params, steps=steps, divergence=loss
        )
    return head_training.new_eagle3(
        target.config,
        target.params,
        ids=ids,
        layers=layers_of(args.feature_layers),
        intermediate_size=args.intermediate_size,
        steps=steps,
        divergence=loss,
        seed=args.seed,
    )


def _eagle1(args: argparse.Namespace, target: Pretrained, first: None, ids: None) -> Apprentice:
    return head_training.new_eagle1(
        target.config,
        intermediate_size=args.intermediate_size,
        divergence=divergence(args.loss),
        seed=args.seed,
    )


def _medusa(args: argparse.Namespace, target: Pretrained, first: None, ids: None) -> Apprentice:
    return head_training.new_medusa(
        target.config,
        target.params,
        count=args.heads or 4,
        divergence=divergence(args.loss),
        seed=args.seed,
    )


def _dflash(args: argparse.Namespace, target: Pretrained, first: None, ids: Any) -> Apprentice:
    return block_training.new_dflash(
        target.config,
        target.params,
        ids=ids,
        layers=layers_of(args.feature_layers),
        depth=args.head_layers or 5,
        block_size=args.block_size or 16,
        mask_token=args.mask_token,
        from_anchor=bool(args.markov_rank or args.confidence),
        markov_rank=args.markov_rank or 0,
        confidence=bool(args.confidence),
        intermediate_size=args.intermediate_size,
        divergence=divergence(args.loss),
        seed=args.seed,
    )


def _model(args: argparse.Namespace, target: Pretrained, first: Pretrained, ids: None) -> Apprentice:
    check_same_vocabulary(target, first)
    return distillation.small_model(
        target.config, first.config, first.params, divergence=divergence(args.loss), seed=args.seed
    )


def _save_eagle(made: Path, config: Any, params: PyTree, args: argparse.Namespace, first: Any) -> None:
    hub.save_eagle(made, config, params, layout=args.layout or "eagle", verifier=str(args.target))


def _save_medusa(made: Path, config: Any, params: PyTree, args: argparse.Namespace, first: Any) -> None:
    save_medusa(made, config, params)


def _save_dflash(made: Path, config: Any, params: PyTree, args: argparse.Namespace, first: Any) -> None:
    contrib.save_dflash(made, config, params, layout=args.layout or "dflash", verifier=str(args.target))


def _save_model(made: Path, config: Any, params: PyTree, args: argparse.Namespace, first: Pretrained) -> None:
    hub.save(made, config, params)
    _copy_tokenizer(first.path, made)


def _copy_tokenizer(source: Path, output: Path) -> None:
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, output / file.name)


class Recipe(NamedTuple):
    """A row of `HEADS`."""

    begin: Callable[..., Apprentice]  # of the flags, the target, what `open` gave, and a draft vocabulary
    save: Callable[..., None]  # of a folder, config, params, the flags, and what `open` gave
    open: Callable[[str, Pretrained], Any] = open_head  # what --from names, for a target


HEADS = {
    "eagle3": Recipe(_eagle3, _save_eagle),
    "eagle1": Recipe(_eagle1, _save_eagle),
    "medusa": Recipe(_medusa, _save_medusa),
    "dflash": Recipe(_dflash, _save_dflash),
    "model": Recipe(_model, _save_model, lambda name, target: hub.load(name, dtype="float32")),
}
