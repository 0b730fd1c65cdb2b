"""PyTorch transformers, as called by all scripts that compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts import common

Tokens = list[list[int]]


class Transformers:
    """A checkpoint, by default in float32, with one thread for each core that this process may use."""

    def __init__(self, path: Path, dtype: str = "float32", **how: Any):
        """
        Args:
          path: a folder, or a GGUF file.
          dtype: of the weights.
          how: further arguments of `from_pretrained`.
        """
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(len(common.cores()))
        folder, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self._torch = torch
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), trust_remote_code=False, **file, **how
        ).eval()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits f32[n, V] of a text."""
        with self._torch.inference_mode():
            return self.model(self._torch.tensor([list(ids)])).logits[0].numpy()

    def generate(
        self, given: Sequence[Sequence[int]], new: int, *, stops: Sequence[int] = (), **how: Any
    ) -> Tokens:
        """Continue prompts in one batch, padded on the left; greedily, unless `how` overrides it.

        Args:
          given: prompts.
          new: tokens of a text; fewer only if it reaches a stop token, which is kept.
          stops: stop tokens; empty if all texts must have the same length.
          how: further arguments of transformers' `generate`.
        """
        width, pad = max(map(len, given)), stops[0] if stops else 0
        ids = self._torch.tensor([[pad] * (width - len(p)) + list(p) for p in given])
        mask = self._torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in given])
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = list(stops) or None, pad
        how = {"do_sample": False, "min_new_tokens": None if stops else new} | how
        with self._torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=new, **how)
        return [cut(row, stops) for row in out[:, width:].tolist()]


def cut(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Return a text up to and including its first stop token.

    >>> cut([1, 2, 9, 9], [9])
    [1, 2, 9]
    """
    at = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return tokens[: at + 1]
