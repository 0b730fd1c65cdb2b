"""The heads and small models that `distill` trains: how each kind starts, and how it is written."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mars_jax import contrib, hub
from mars_jax.contrib.drafters.medusa_files import save_medusa
from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.pretrained import Pretrained, check_same_vocabulary
from mars_jax.lab.training import (
    data,
    dflash_training,
    distillation,
    eagle_training,
    features,
    medusa_training,
)
from mars_jax.lab.training.loop import Apprentice
from mars_jax.lab.training.objectives import divergence
from mars_jax.models.eagle_head import EagleConfig


class Head(NamedTuple):
    """A trained EAGLE-3 head, with params in float32."""

    config: EagleConfig
    params: PyTree


def open_first(args: argparse.Namespace, target: Pretrained) -> Any:
    """Load the checkpoint of `--from`: a `Head` for eagle3, otherwise a model.

    Raises:
      MarsError: as `hub.load` and `hub.load_eagle`, or it is no EAGLE-3 head.
    """
    if args.kind != "eagle3":
        return hub.load(args.first, dtype="float32" if args.kind == "model" else None)
    config, params = hub.load_eagle(args.first, target.config, target.params, dtype="float32")
    if config.version != 3:
        raise MarsError(
            f"--from {args.first} is an EAGLE-1 head: name an EAGLE-3 head, or leave it out to start a new one."
        )
    return Head(config, params)


def layers_of(names: str | None) -> tuple[int, ...] | None:
    """Parse `--feature-layers`.

    >>> layers_of("1,14,26")
    (1, 14, 26)
    """
    try:
        return None if names is None else tuple(int(part) for part in names.split(","))
    except ValueError:
        raise MarsError(f"--feature-layers is {names}: expected layer numbers such as 1,15,28.") from None


def feature_layers(args: argparse.Namespace, target: Pretrained, head: Head | None) -> tuple[int, ...]:
    """Return the layers of the target that an EAGLE-3 head reads."""
    if head is not None:
        return head.config.feature_layers
    return layers_of(args.feature_layers) or eagle_training.feature_layers(target.config)


def draft_vocabulary(
    args: argparse.Namespace, target: Pretrained, streams: Sequence[data.Stream]
) -> np.ndarray | None:
    """Choose the draft vocabulary of `--draft-vocab`, ids i32[W], from texts and dumps; None: all tokens."""
    size = target.config.vocab_size
    if args.draft_vocab in (None, size):
        return None
    texts = list(streams)
    for dump in args.features or ():
        for folder in features.shards(dump):
            shard = features.read_shard(folder)
            tokens = shard.tokens[shard.segments != features.PADDING]
            texts.append(data.Stream(tokens, np.zeros_like(tokens), len(tokens)))
    return data.draft_vocabulary(texts, args.draft_vocab, size, target.stop_tokens)


def start(args: argparse.Namespace, target: Pretrained, first: Any, ids: np.ndarray | None) -> Apprentice:
    """Make the apprentice of a kind.

    Args:
      args: flags.
      target: its target.
      first: from `open_first`, or None.
      ids: i32[W]; draft vocabulary, None: all tokens.
    """
    loss = divergence(args.loss)
    if args.kind == "model":
        check_same_vocabulary(target, first)
        return distillation.small_model(target.config, first.config, first.params, divergence=loss)
    if args.kind == "medusa":
        return medusa_training.new_medusa(
            target.config, target.params, count=args.heads or 4, divergence=loss, seed=args.seed
        )
    if args.kind == "eagle1":
        return eagle_training.new_eagle1(
            target.config, intermediate_size=args.intermediate_size, divergence=loss, seed=args.seed
        )
    if args.kind == "dflash":
        return dflash_training.new_dflash(
            target.config,
            target.params,
            ids=ids,
            layers=layers_of(args.feature_layers),
            depth=args.head_layers or 5,
            block_size=args.block_size or 16,
            from_anchor=bool(args.markov_rank or args.confidence),
            markov_rank=args.markov_rank or 0,
            confidence=bool(args.confidence),
            intermediate_size=args.intermediate_size,
            divergence=loss,
            seed=args.seed,
        )
    return eagle_training.new_eagle3(
        target.config,
        target.params,
        ids=ids,
        layers=layers_of(args.feature_layers),
        intermediate_size=args.intermediate_size,
        trained=first,
        steps=args.steps_ahead or 5,
        divergence=loss,
        seed=args.seed,
    )


def save(folder: Path, args: argparse.Namespace, config: Any, params: PyTree, first: Any) -> None:
    """Write a trained drafter in the layout of its kind."""
    if args.kind == "model":
        hub.save(folder, config, params)
        _copy_tokenizer(first.path, folder)
    elif args.kind == "medusa":
        save_medusa(folder, config, params)
    elif args.kind == "dflash":
        layout = args.layout or "dflash"
        contrib.save_dflash(folder, config, params, layout=layout, verifier=str(args.target))
    else:
        layout = args.layout or "eagle"
        hub.save_eagle(folder, config, params, layout=layout, verifier=str(args.target))


def _copy_tokenizer(source: Path, output: Path) -> None:
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, output / file.name)
