"""Hugging Face transformers on PyTorch, for the scripts that compare mars-jax with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts import common

Tokens = list[list[int]]


class Transformers:
    """A checkpoint loaded with transformers; PyTorch uses one thread for each core available to this process."""

    def __init__(self, path: Path, dtype: str = "float32", **options: Any):
        """
        Args:
          path: folder of the checkpoint, or a GGUF file.
          dtype: dtype of the weights.
          options: further arguments of `from_pretrained`.
        """
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(len(common.cores()))
        folder, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self._torch = torch
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), trust_remote_code=False, **file, **options
        ).eval()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits f32[n, V] of n tokens."""
        with self._torch.inference_mode():
            return self.model(self._torch.tensor([list(ids)])).logits[0].numpy()

    def generate(
        self, prompts: Sequence[Sequence[int]], new: int, *, stops: Sequence[int] = (), **options: Any
    ) -> Tokens:
        """Continue prompts in one batch, padded on the left. Decoding is greedy unless `options` overrides this.

        Args:
          prompts: token ids of each prompt.
          new: number of new tokens. A completion that reaches a stop token ends with it and may be shorter.
          stops: stop tokens. Without stop tokens, all completions have the same length.
          options: further arguments of transformers' `generate`.
        """
        width, pad = max(map(len, prompts)), stops[0] if stops else 0
        ids = self._torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = self._torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = list(stops) or None, pad
        options = {"do_sample": False, "min_new_tokens": None if stops else new} | options
        with self._torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        return [cut(row, stops) for row in out[:, width:].tolist()]


def cut(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first stop token.

    >>> cut([1, 2, 9, 9], [9])
    [1, 2, 9]
    """
    end = next((i for i, token in enumerate(tokens, start=1) if token in stops), len(tokens))
    return tokens[:end]
