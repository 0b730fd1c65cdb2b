"""`Pretrained`: a model together with its weights, its config and its tokenizer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.hub.conversation import Turn as Turn
from mars_jax.hub.conversation import as_conversation, as_turns
from mars_jax.hub.gguf_file import is_gguf, read_gguf
from mars_jax.hub.tokenizer import TOKENIZER_FILES, catch_panics, on_all_cores, read_plain, read_tokenizer
from mars_jax.models.config import ModelConfig
from mars_jax.utils import errors
from mars_jax.utils.catalogue import template_of
from mars_jax.utils.errors import MarsError, check_count, check_switch, check_text, check_type
from mars_jax.utils.limits import PREFIXES, PROMPT_BYTES


class OwnConfig(NamedTuple):
    """The config of a user's model: the fields of `ModelConfig` that text generation reads."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


Prompt = str | Sequence[Turn]
"""A prompt: a string, or a conversation as a sequence of turns."""


def check_pretrained(target: object) -> None:
    """Raise MarsError if `target` is not a `Pretrained`."""
    check_type("the target", target, Pretrained, "what mars_jax.load or Pretrained.from_parts makes")


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A loaded model: pure functions, their params, the static config and the tokenizer."""

    name: str  # for messages and reports
    model: LanguageModel  # pure functions
    params: PyTree  # weights; None from `outline`
    config: ModelConfig  # sizes, dtypes and other static settings
    path: Path  # the checkpoint's directory or GGUF file
    mesh: Mesh | None = None  # mesh that params are sharded over; None for one device
    own_tokenizer: Any = None  # tokenizer from the user, used in place of the one in `path`

    @staticmethod
    def from_parts(
        model: LanguageModel,
        params: PyTree,
        tokenizer: Any = None,
        *,
        config: ModelConfig | None = None,
        max_positions: int | None = None,
        stop_tokens: Sequence[int] = (),
        mesh: Mesh | None = None,
        name: str = "a model of one's own",
    ) -> Pretrained:
        """Make a `Pretrained` from your own functions and weights, for `generate`, `score`, drafters and sessions.

        Args:
          model: the functions of the model.
          params: the weights, in any pytree that the functions accept.
          tokenizer: a transformers tokenizer; None if prompts and completions are token ids.
          config: config of a model from `mars_jax.models`. Drafters that are trained for a specific target need it.
          max_positions: maximum length of prompt and completion together, if there is no config.
          stop_tokens: ids that end a completion, if there is no config; default: the tokenizer's end-of-text token.
          mesh: mesh that params are sharded over.
          name: name used in messages.

        Raises:
          MarsError: config and max_positions are both given or both absent.

        >>> from mars_jax.core import fake
        >>> made = Pretrained.from_parts(fake.hash_model(vocab_size=11), (), max_positions=64)
        >>> made.config.vocab_size, made.has_tokenizer
        (11, False)
        """
        if (config is None) == (max_positions is None):
            raise MarsError("from_parts takes either a config or max_positions: give one of the two.")
        if config is not None and stop_tokens:
            raise MarsError("stop_tokens do not apply if there is a config: set its eos_token_ids.")
        check_type("the model", model, LanguageModel, "a LanguageModel")
        model_config: Any = config
        if model_config is None:
            check_count("max_positions", max_positions)
            stops = token_ids("stop_tokens", stop_tokens, model.vocab_size)
            model_config = OwnConfig(model.vocab_size, int(max_positions or 0), stops)
        return Pretrained(name, model, params, model_config, Path(os.devnull), mesh, tokenizer)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Return the context for tracing and running programs with these params: `jax.set_mesh` if there is a mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the checkpoint.

        If the files of a model in `utils.catalogue` have no chat template, the tokenizer uses the one listed there.

        Raises:
          MarsError: the tokenizer is absent or cannot be read.
        """
        if self.own_tokenizer is not None:
            return self.own_tokenizer
        if self.path == Path(os.devnull):
            raise MarsError(f"'{self.name}' has no tokenizer: give from_parts one, or prompts as token ids.")
        tokenizer = copy.copy(read_tokenizer(self.path))  # do not change the template of the cached tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            tokenizer.chat_template = template_of(self.name)
        return tokenizer

    @functools.cached_property
    def _plain(self) -> Any:
        """A `tokenizers.Tokenizer` that is equivalent to `tokenizer` but loads faster; None if unavailable."""
        if self.own_tokenizer is not None:
            return None
        return read_plain(self.path)

    @functools.cached_property
    def invalid_byte(self) -> int | None:
        """Token id of the byte 0xFF, which never occurs in UTF-8; None for a tokenizer without byte fallback."""
        name = "<0xFF>"
        if not self.has_tokenizer:
            return None
        if self._plain is not None:
            return self._plain.token_to_id(name)
        # A tokenizer from another library may lack these methods. A tokenizer without an unknown token raises
        # TypeError.
        with contextlib.suppress(AttributeError, TypeError):
            token = self.tokenizer.convert_tokens_to_ids(name)
            if self.tokenizer.convert_ids_to_tokens(token) == name:
                return token
        return None

    @functools.cached_property
    def has_tokenizer(self) -> bool:
        """True if the checkpoint contains a tokenizer. Without one, prompts and completions are token ids."""
        if self.own_tokenizer is not None:
            return True
        if is_gguf(self.path):
            return read_gguf(self.path).get("tokenizer.ggml.model") is not None
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a completion: those in the config or, if it lists none, the tokenizer's end-of-text token."""
        if self.config.eos_token_ids or not self.has_tokenizer:
            return self.config.eos_token_ids
        eos = self.tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    @functools.cached_property
    def chat_stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer in a chat: `stop_tokens`, and the tokenizer's end-of-text and end-of-turn tokens.

        The end-of-turn token is the special token that the chat template writes directly after an assistant's message,
        such as <|im_end|>. In some checkpoints, no config lists this token.
        """
        if not self.has_tokenizer:
            return self.stop_tokens
        turns = [*as_turns("A question"), {"role": "assistant", "content": "An answer"}]
        text = ""
        # A tokenizer may have no template, or its template may reject these turns.
        with contextlib.suppress(Exception), _bounded_templates():
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        chat_ending = text.partition("An answer")[2]
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {token.content: i for i, token in added.items() if token.special}
        ends = [token for token in special if token and chat_ending.startswith(token)]
        # One special token may be a prefix of another, so take the longest match.
        ids = [special[token] for token in sorted(ends, key=len)[-1:]]
        if self.tokenizer.eos_token_id is not None:
            ids.append(int(self.tokenizer.eos_token_id))
        return tuple(dict.fromkeys([*self.stop_tokens, *(i for i in ids if i < self.config.vocab_size)]))

    def encode(
        self,
        prompt: Prompt,
        *,
        chat: bool = False,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a string or a conversation. If `chat` is True, a string is encoded as a user turn.

        Raises:
          MarsError: the prompt is empty, or `encode_chat` rejects it.
        """
        check_switch("chat", chat)
        if not isinstance(prompt, str):
            return self.encode_chat(prompt, system=system, template_args=template_args)
        if not prompt:
            raise MarsError("the prompt is empty: give at least one character of text to continue.")
        check_text("the prompt", prompt)
        if chat:
            return self.encode_chat(as_turns(prompt), system=system, template_args=template_args)
        with catch_panics(self.name):
            self._check_length(prompt)
            tokens = list(self.check_tokens(self._ids(prompt)))
        self._warn_of_second_bos([prompt], [tokens])
        return tokens

    def _warn_of_second_bos(self, prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]]) -> None:
        """Warn if a prompt begins with the BOS token and the tokenizer adds another one."""
        bos = self.config.bos_token_id
        if bos is None:
            bos = getattr(self.own_tokenizer, "bos_token_id", None)
        twice = [prompt for prompt, ids in zip(prompts, encoded, strict=True) if list(ids[:2]) == [bos, bos]]
        if not twice:
            return
        if self._plain is None:
            token = self.tokenizer.convert_ids_to_tokens(bos)
        else:
            token = self._plain.id_to_token(bos)
        # If the prompt strings themselves begin with two BOS tokens, the tokenizer did not necessarily add one.
        if not all(str(prompt).startswith(2 * token) for prompt in twice):
            errors.warn(
                f"a prompt begins with {token}, which the tokenizer of '{self.name}' adds as well, so that the model "
                "reads it twice: leave it out of the prompt."
            )

    def encode_chat(
        self,
        turns: Sequence[Turn],
        *,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the point where the model's answer begins.

        Args:
          turns: dicts with a `role` and `content`. If the last turn is the assistant's, the model continues it.
          system: content of a system turn to prepend, if the turns do not begin with one.
          template_args: variables of the template, such as `{"enable_thinking": False}`.

        Raises:
          MarsError: the tokenizer has no chat template, or the template rejects these turns.
        """
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise MarsError(f"'{self.name}' has no chat template: leave --chat out, or use another model.")
        turns = as_conversation(turns, system)
        check_type("template_args", template_args, (Mapping, type(None)), "variables of the template by name")
        continues = turns[-1]["role"] == "assistant"

        # Do not use `functools.partial`, because template_args could then override these arguments.
        def apply(**form: bool) -> Any:
            return tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **form,
                **(template_args or {}),
            )

        try:
            with catch_panics(self.name), _bounded_templates():
                # Render a long conversation to text first, so that one far above the limit is not encoded in full.
                if sum(len(str(turn["content"])) for turn in turns) > PREFIXES[0]:
                    self._check_length(apply(tokenize=False))
                encoded = apply(tokenize=True, return_dict=True)
        except MarsError:
            raise
        except Exception as error:  # a template is a program and may raise any exception
            raise MarsError(
                f"the chat template of '{self.name}' cannot be applied ({errors.first_line(error)}): correct it, or "
                "leave --chat out."
            ) from error
        return list(self.check_tokens(encoded["input_ids"]))

    def encode_many(
        self,
        prompts: Sequence[Prompt],
        *,
        chat: bool = False,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Encode many prompts, each as `encode` does. Plain strings are encoded in parallel.

        Raises:
          MarsError: `encode` rejects a prompt; the error describes the first such prompt.
        """
        check_type("prompts", prompts, (list, tuple), "a list of strings or conversations")
        check_switch("chat", chat)
        encoded: list[list[int]] = []
        if not chat and all(isinstance(prompt, str) and len(prompt) <= PREFIXES[0] for prompt in prompts):
            # If this fails, the code below encodes the prompts one by one, so that the error identifies the prompt.
            with contextlib.suppress(Exception), on_all_cores(), catch_panics(self.name):
                if self._plain is None:
                    encoded = self.tokenizer(list(prompts))["input_ids"]
                else:
                    encoded = [encoding.ids for encoding in self._plain.encode_batch(prompts)]
        # `encode` reports the error if a prompt or its encoding is empty.
        if len(encoded) != len(prompts) or not all(encoded) or not all(prompts):
            return [self.encode(p, chat=chat, system=system, template_args=template_args) for p in prompts]
        self._warn_of_second_bos(prompts, encoded)
        return encoded

    def _check_length(self, text: str) -> None:
        """Raise MarsError if a prompt is far too long, without encoding all of it."""
        if (size := len(text.encode("utf-8", "surrogatepass"))) > PROMPT_BYTES:
            raise MarsError(f"the prompt has {size:,} bytes: expected at most {PROMPT_BYTES:,}; shorten it.")
        limit = self.config.max_positions
        for prefix in PREFIXES:
            # In the encoding of the whole prompt, the last tokens of a prefix may merge with the following text. So
            # reject only prefixes that exceed the limit by 25%.
            if len(text) > prefix and len(self._ids(text[:prefix])) > limit + limit // 4:
                raise MarsError(
                    f"the prompt has more than {limit} tokens and '{self.name}' a context of {limit}: shorten the "
                    "prompt."
                )

    def _ids(self, text: str) -> list[int]:
        if self._plain is None:
            return self.tokenizer(text)["input_ids"]
        return self._plain.encode(text).ids

    def check_tokens(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a prompt as ints.

        Raises:
          MarsError: `ids` is empty, or an id is not a whole number or is outside of the model's vocabulary.
        """
        tokens = token_ids("the prompt", ids)
        if not tokens:
            raise MarsError("the prompt has no tokens: give at least one.")
        outside = [i for i in tokens if not 0 <= i < self.config.vocab_size]
        if outside:
            raise MarsError(
                f"prompt token {outside[0]} is outside of the {self.config.vocab_size} tokens of '{self.name}': "
                "tokenize the prompt with this model's own tokenizer."
            )
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, leaving out special tokens; "" if there is no tokenizer.

        Raises:
          MarsError: an id is not a whole number or is outside of the model's vocabulary.
        """
        tokens = list(token_ids("ids", ids, self.config.vocab_size))
        if not self.has_tokenizer:
            return ""
        with catch_panics(self.name):
            if self._plain is not None:
                return self._plain.decode(tokens, skip_special_tokens=True)
            return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _bounded_templates() -> contextlib.AbstractContextManager[None]:
    from mars_jax.hub import chat_template  # imports jinja2, which plain prompts do not need

    return chat_template.bounded_templates()


def token_ids(name: str, values: Any, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return a sequence of token ids as a tuple of ints, checked against `vocab_size` unless it is None.

    Raises:
      MarsError: `values` is not a sequence, or an entry is not a whole number or is out of range.

    >>> token_ids("stop_tokens", range(3, 5), 11)
    (3, 4)
    """
    expected = "token ids" if vocab_size is None else f"token ids from 0 to {vocab_size - 1}"
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        raw = tuple(values.tolist() if hasattr(values, "tolist") else values)
        ids = tuple(map(operator.index, raw))
        outside = vocab_size is not None and any(not 0 <= i < vocab_size for i in ids)
        # `operator.index` accepts True and False, which are not token ids.
        if outside or any(isinstance(i, bool) for i in raw):
            raise ValueError
    except (TypeError, ValueError):
        raise MarsError(f"{name} is {errors.short_repr(values)}: expected a list of {expected}.") from None
    return ids


def differing_tokens(target: Pretrained, draft: Pretrained) -> list[str]:
    """Return the tokens that have different ids in the two models, or exist in only one of them, sorted.

    The sizes of the embeddings are not compared: checkpoints of one family may pad them differently.

    Raises:
      MarsError: a model has no tokenizer, and the vocabulary sizes differ.
    """
    if not (target.has_tokenizer and draft.has_tokenizer):
        target_size, draft_size = target.config.vocab_size, draft.config.vocab_size
        if target_size != draft_size:  # without tokenizers, only the sizes can be compared
            raise MarsError(
                f"the draft '{draft.name}' has a vocabulary of {draft_size} tokens and the target '{target.name}' one "
                f"of {target_size}: pair models that share a tokenizer."
            )
        return []
    target_ids, draft_ids = ((model._plain or model.tokenizer).get_vocab() for model in (target, draft))
    return sorted(t for t in target_ids | draft_ids if target_ids.get(t) != draft_ids.get(t))


def check_same_vocabulary(target: Pretrained, draft: Pretrained) -> None:
    """Raise MarsError if two models have different tokens or ids; see `differing_tokens`."""
    if differing := differing_tokens(target, draft):
        raise MarsError(
            f"the draft '{draft.name}' and the target '{target.name}' have different vocabularies ({len(differing)} "
            f"tokens differ, such as {differing[0]!r}): pair models that share a tokenizer."
        )
