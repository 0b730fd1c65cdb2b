"""The EAGLE-3 head that `distill` trains: a new one, or with `--from` one that has been trained before."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from mars_jax import hub
from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.commands.distill_layers import layers_of
from mars_jax.lab.training import head_training
from mars_jax.lab.training.loop import Apprentice
from mars_jax.models.eagle_head import EagleConfig

STEPS_AHEAD = 5


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


def feature_layers(args: argparse.Namespace, target: Pretrained, head: Head | None) -> tuple[int, ...]:
    """The layers of the target that the head reads."""
    if head is not None:
        return head.config.feature_layers
    return layers_of(args.feature_layers) or head_training.feature_layers(target.config)


def apprentice(
    args: argparse.Namespace, target: Pretrained, head: Head | None, loss: Any, ids: Any
) -> Apprentice:
    """The head as it begins: `head`, or a new one whose draft vocabulary is `ids`, default: all tokens."""
    steps = args.steps_ahead or STEPS_AHEAD
    if head is not None:
        return head_training.eagle3_again(
            target.config, head.config, head.params, steps=steps, divergence=loss
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
