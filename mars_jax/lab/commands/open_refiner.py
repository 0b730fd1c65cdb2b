"""The flag --refine: what lets a draft learn from its failures."""

from __future__ import annotations

from typing import Any

from mars_jax import drafters, hub, specs
from mars_jax.core.errors import MarsError
from mars_jax.drafters.shared_tokens import Shared
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.training import online
from mars_jax.lab.training.data import documents

HELD_OUT, WIDTH = 16, 256
"""Texts that are never learned, at most, and tokens of a text that are learned."""


def open_refiner(
    file: str,
    target: Pretrained,
    draft: str,
    drafter: drafters.LoadedDrafter,
    *,
    dtype: str | None,
    samples: bool,
) -> online.Refiner:
    """The refiner of a draft, which the texts of a file guard.

    Args:
      file: of texts with lines of <|endoftext|> between them.
      target: that it drafts for.
      draft: the spec of the drafter, of `specs.REFINED`.
      drafter: that is loaded.
      dtype: that it was loaded with.
      samples: tau on held-out texts is that of drawn tokens.

    Raises:
      MarsError: the file holds fewer than two texts, or the draft does not learn this way.
    """
    width = min(WIDTH, target.config.max_positions)
    texts = [target.encode(text)[:width] for text in documents(file)]
    if len(texts) < 2:
        raise MarsError(
            f"--refine is {file}, which holds {len(texts)} texts: give at least 2, one to hold out and one to learn, "
            "with a line of <|endoftext|> between them."
        )
    kind, path = specs.parse_draft(draft)
    model: Any
    if kind in online.HEADS:
        model, _ = online.HEADS[kind].load(path, target.config, target.params, dtype=dtype)
    else:
        model = hub.load(path, dtype=dtype).model
    params = drafter.params if drafter.sizes is None else drafter.params.weights
    if isinstance(params, Shared):
        raise MarsError(
            f"--refine does not apply to --draft {draft}, which has another tokenizer than the target: leave it out."
        )
    held_out = texts[:: max(len(texts) // HELD_OUT, 2)][:HELD_OUT]
    return online.Refiner(
        target.model,
        model,
        params,
        depth=drafter.drafter.max_depth,
        held_out=held_out,
        old=[text for text in texts if not any(text is one for one in held_out)],
        target_params=target.params,
        width=width,
        temperature=1.0 if samples else 0.0,
    )
