"""A checkpoint together with its tokenizer: text in, text out. Tokenizers and chat templates are transformers'."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mars_jax import assets, hub
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import parse_mesh
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.hub.files import resolve
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import language_model
from mars_jax.placement.shardings import params_shardings

# Names under which transformers 4 and 5 save a tokenizer that tokenizer.json describes in full.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PARALLEL = "TOKENIZERS_PARALLELISM"
_USER_CHOSE = _PARALLEL in os.environ
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A loaded model: pure functions, their params, the static config and the tokenizer."""

    name: str
    model: LanguageModel
    params: PyTree
    config: ModelConfig
    path: str
    mesh: Mesh | None = None  # over which params are divided; None is one device

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The context to trace and run programs over these params in: `jax.set_mesh`, where there is a mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the checkpoint's directory.

        Raises:
          MarsError: the directory holds none that can be read.
        """
        return _read_tokenizer(self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint's directory holds any tokenizer; without one it takes and gives token ids."""
        return any(os.path.exists(os.path.join(self.path, name)) for name in _TOKENIZER_FILES)

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
                f"the chat template of '{self.name}' cannot be applied ({_reason(error)}): correct it, or leave "
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
            with _on_all_cores():
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


# By directory, so that an outline and the model loaded after it read one tokenizer once.
@functools.lru_cache(maxsize=4)
def _read_tokenizer(path: str) -> Any:
    os.environ.setdefault(_PARALLEL, "false")
    with _no_advice():
        from transformers.utils import logging

    logging.set_verbosity_error()  # advice of the tokenizer's is not ours to print
    try:
        # Without the flag transformers asks on stdin whether to run the checkpoint's code.
        return _tokenizer_class(path).from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises anything from OSError to tokenizers' bare Exception
        cure = "put the checkpoint's tokenizer files beside its weights, or give prompts as token ids"
        if "auto_map" in _tokenizer_config(path):
            cure = (
                "its tokenizer_config.json names code of the checkpoint's own (auto_map), which is never run; give "
                "prompts as token ids, or use a checkpoint whose tokenizer transformers has"
            )
        raise MarsError(f"no tokenizer could be read from '{path}' ({_reason(error)}): {cure}.") from error


def _reason(error: Exception) -> str:
    """The first line of what an error of another library says, else its type."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".:") or type(error).__name__


@contextlib.contextmanager
def _on_all_cores() -> Iterator[None]:
    """Let tokenizers divide a batch over threads, unless the user's environment says otherwise.

    Not for longer: a process that forks while they may would be warned of it.
    """
    before = os.environ.get(_PARALLEL)
    if not _USER_CHOSE:
        os.environ[_PARALLEL] = "true"
    try:
        yield
    finally:
        if not _USER_CHOSE and before is not None:
            os.environ[_PARALLEL] = before


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """On import transformers says where PyTorch is missing, of which a tokenizer has no need."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _tokenizer_class(path: str) -> Any:
    """The class that `AutoTokenizer` would choose. Where the files name it, its import, 2 s of a start, is saved."""
    import transformers

    data = _tokenizer_config(path)
    described = os.path.exists(os.path.join(path, "tokenizer.json"))
    if described and data.get("tokenizer_class") in _PLAIN and "auto_map" not in data:
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def _tokenizer_config(path: str) -> dict[str, Any]:
    """The object in tokenizer_config.json; {} where there is no such file, or something else in it."""
    try:
        with open(os.path.join(path, "tokenizer_config.json"), encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError):  # AutoTokenizer says what is wrong with it
        return {}
    return data if isinstance(data, dict) else {}


def outline(name: str) -> Pretrained:
    """A checkpoint without its weights: `params` is None. Enough to tokenize and check prompts.

    Raises:
      MarsError: no such checkpoint, or one that is not supported.
    """
    directory = resolve(name, weights=False)
    config = hub.read_config(directory)
    model = language_model(config)
    return Pretrained(name=name, model=model, params=None, config=config, path=str(directory))


def load(
    name: str = assets.TARGET, *, dtype: str | None = None, mesh: Mesh | str | None = None, check: bool = True
) -> Pretrained:
    """Load a checkpoint in the Hugging Face layout: a local directory, or a name on the hub.

    Args:
      name: directory, `owner/name`, or a checkpoint inside the package: "tiny/target" (the default), "tiny/draft".
      dtype: "float32", "bfloat16" or "int8"; default: the checkpoint's own. See `hub.load`.
      mesh: devices to divide the weights over, with any of the axes `data`, `model` and `expert`, of type Auto or
        Explicit, or a text such as "data=2,model=4"; see `mars_jax.placement.shardings`. `generate` then divides the
        batch over `data`.
      check: whether to compare the checksums of a conversion; see `hub.load`.

    Raises:
      MarsError: with one sentence that names what is wrong and the cure.

    >>> target = load("path/to/Llama-3.1-8B-Instruct", dtype="bfloat16")  # doctest: +SKIP
    >>> target = load("path/to/Llama-3.3-70B-Instruct", mesh="data=2,model=4")  # doctest: +SKIP
    """
    mesh = _mesh(mesh)
    shardings = None
    if mesh is not None:
        shardings = params_shardings(hub.read_config(resolve(name, weights=False)), mesh)
    checkpoint = hub.load(name, dtype=dtype, shardings=shardings, check=check)
    return Pretrained(
        name=name,
        model=checkpoint.model,
        params=checkpoint.params,
        config=checkpoint.config,
        path=str(checkpoint.path),
        mesh=mesh,
    )


def _mesh(given: Any) -> Mesh | None:
    if given is None or isinstance(given, Mesh):
        return given
    if isinstance(given, str):
        return parse_mesh(given)
    raise MarsError(
        f'the mesh is {given!r}: expected a jax.sharding.Mesh, or a text such as "data=2,model=4".'
    )


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


class Detokenizer:
    """Turn a growing list of tokens into text, piece by piece; the pieces joined are the text of the whole.

    Bytes of an unfinished character are held back until it is complete. Only the tokens since the piece before
    last are decoded again, so the cost of a piece does not grow with the text.
    """

    def __init__(self, pretrained: Pretrained, prompt_tokens: Sequence[int]):
        self._decode = pretrained.decode
        # The prompt's tail gives the tokenizer the context in which the first new token joins the text.
        self._tokens = list(prompt_tokens)[-8:]
        self._context, self._read = 0, len(self._tokens)

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Text that `tokens` complete. `last` releases what was held back."""
        self._tokens += list(tokens)
        shown = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if not last and (text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(shown)):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(shown) :]
