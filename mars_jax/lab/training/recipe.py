"""The project's training recipe: the optimizer and its schedule, and the plot of a log."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from mars_jax.lab.pictures import COLOURS, picture
from mars_jax.lab.training.loop import warmup_stable_decay

DECAY = 0.35
"""Share of a training's steps, its last ones, over which the learning rate falls to zero."""


def muon(peak: float, steps: int, *, warmup: int = 50, decay: float = DECAY) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers and Adam for the rest, on a warmup-stable-decay schedule.

    Embeddings and unembeddings are Adam's, as Muon's author advises (Jordan 2024). Updates of both kinds have the
    same root mean square (arXiv 2502.16982, section 2.2), so that they share one learning rate.

    Args:
      peak: learning rate of the plateau.
      steps: of the whole training.
      warmup: steps to the plateau, a tenth of the training at most.
      decay: share of the steps that falls to zero.

    >>> muon(1e-3, 100).init({"q": np.ones((4, 4), np.float32)}) is not None
    True
    """

    def inner_matrices(params):
        def spec(path, x):
            inside = x.ndim == 2 and "embed" not in jax.tree_util.keystr(path)
            return optax.contrib.MuonDimensionNumbers() if inside else None

        return jax.tree_util.tree_map_with_path(spec, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            warmup_stable_decay(peak, steps, warmup=min(warmup, max(1, steps // 10)), decay=decay),
            weight_decay=0.1,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=inner_matrices,
        ),
    )


def plot(
    log: str | os.PathLike[str],
    picture_file: str | os.PathLike[str],
    panels: Mapping[str, Sequence[str]],
    *,
    tokens: int,
) -> None:
    """Draw figures of a training log over the tokens seen, as running means.

    Args:
      log: the log.jsonl of `training.fit`.
      picture_file: file to write, whose suffix says the format.
      panels: title -> names of the figures in it.
      tokens: of a step.
    """
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    window = max(1, len(rows) // 100)
    seen = [row["step"] * tokens / 1e6 for row in rows[window - 1 :]]
    caption = (
        f"{len(rows)} steps, {rows[-1]['step'] * tokens / 1e6:.3g} million tokens; means of {window} steps."
    )
    with picture(
        [Path(picture_file)], columns=len(panels), panel=(4.6, 3.2), caption=caption, legend=False
    ) as axes:
        for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
            for name, colour in zip(names, itertools.cycle(COLOURS)):
                mean = np.convolve([row[name] for row in rows], np.ones(window) / window, mode="valid")
                axis.plot(seen, mean, color=colour, label=name)
            axis.set(xlabel="million tokens", ylabel=f"mean of {window} steps", title=title)
            if len(names) > 1:
                axis.legend()
