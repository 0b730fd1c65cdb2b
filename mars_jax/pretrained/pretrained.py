"""A checkpoint together with its tokenizer: text in, text out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mars_jax.core.errors import MarsError
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.models.config import ModelConfig
from mars_jax.pretrained.gguf_file import is_gguf, read_gguf
from mars_jax.pretrained.tokenizer import TOKENIZER_FILES, first_line, on_all_cores, read_tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A loaded model: pure functions, their params, the static config and the tokenizer."""

    name: str
    model: LanguageModel
    params: PyTree  # None where only the outline was read
    config: ModelConfig
    path: Path  # the directory or GGUF file it came from
    mesh: Mesh | None = None  # over which params are divided; None is one device

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The context to trace and run programs over these params in: `jax.set_mesh`, where there is a mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the checkpoint.

        Raises:
          MarsError: it has none that can be read.
        """
        return read_tokenizer(self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint has any tokenizer; without one it takes and gives token ids."""
        if is_gguf(self.path):
            return read_gguf(self.path).get("tokenizer.ggml.model") is not None
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a text: the config's, else the tokenizer's."""
        if self.config.eos_token_ids:
            return self.config.eos_token_ids
        eos = self.tokenizer.eos_token_id if self.has_tokenizer else None
        return () if eos is None else (int(eos),)

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt, as one user turn of the chat template if `chat`.

        Raises:
          MarsError: the prompt is empty, or as `encode_chat`.
        """
        if not prompt:
            raise MarsError("the prompt is empty: give at least one character of text to continue.")
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        ids = self.tokenizer(prompt)["input_ids"]
        self.check_tokens(ids)
        return [int(i) for i in ids]

    def encode_chat(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, each turn with its `role` and `content`, up to where the model is to answer.

        Raises:
          MarsError: the tokenizer has no chat template, or one that does not take these turns.
        """
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise MarsError(
                f"'{self.name}' has no chat template: leave --chat out, or use an instruction-tuned model."
            )
        try:
            encoded = tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
            raise MarsError(
                f"the chat template of '{self.name}' cannot be applied ({first_line(error)}): correct it, or leave "
                "--chat out."
            ) from error
        ids = encoded["input_ids"]
        self.check_tokens(ids)
        return [int(i) for i in ids]

    def encode_many(self, prompts: Sequence[str], *, chat: bool = False) -> list[list[int]]:
        """`encode` of many prompts at once, on all cores where the tokenizer can.

        Raises:
          MarsError: as `encode`, of the first prompt that it refuses.
        """
        try:
            with on_all_cores():
                if chat:
                    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
                    found = self.tokenizer.apply_chat_template(
                        turns, add_generation_prompt=True, return_dict=True
                    )["input_ids"]
                else:
                    found = self.tokenizer(list(prompts))["input_ids"]
            if all(prompts) and all(found):
                return found
        except Exception:  # of a template, or of a tokenizer: the prompt at fault says what it is
            pass
        return [self.encode(prompt, chat=chat) for prompt in prompts]

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raise MarsError where ids are none at all, or outside of the model's vocabulary."""
        if not len(ids):
            raise MarsError("the prompt has no tokens: give at least one.")
        outside = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if outside:
            raise MarsError(
                f"prompt token {outside[0]} is outside of the {self.config.vocab_size} tokens of '{self.name}': "
                "tokenize the prompt with this model's own tokenizer."
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; "" where there is no tokenizer."""
        if not self.has_tokenizer:
            return ""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def check_same_vocabulary(target: Pretrained, draft: Pretrained) -> None:
    """Raise MarsError where two tokenizers give a token id different meanings.

    Checkpoints of one family may pad their embeddings to different sizes; only the tokens count.
    """
    if not (target.has_tokenizer and draft.has_tokenizer):
        ours, theirs = target.config.vocab_size, draft.config.vocab_size
        if ours != theirs:  # without words to compare, their number is all there is
            raise MarsError(
                f"the draft '{draft.name}' has a vocabulary of {theirs} tokens and the target '{target.name}' one "
                f"of {ours}: pair models that share a tokenizer."
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    raise MarsError(
        f"the draft '{draft.name}' and the target '{target.name}' have different vocabularies ({len(theirs)} and "
        f"{len(ours)} tokens; {len(differing)} differ, such as {differing[0]!r}): pair models that share a tokenizer."
    )
