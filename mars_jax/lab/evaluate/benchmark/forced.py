"""Read texts with a draft and its target at every place at once: what either would say, given the text up to there.

A draft that was accepted so far has the text's own tokens, so what its model says next is what it says of the text.
That is one forward over the text for a language model. A head goes on from its own features, so it is one for each
token ahead, as in its training. A drafter that copies is asked at every prefix.

B rows, L tokens of a row, V vocabulary, T new tokens of a text, K places of a draft. Oracle: decodes of the same pairs,
in tests/lab/evaluate/test_forecast.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax import hub, specs
from mars_jax.contrib.drafters.replay import load_replay
from mars_jax.contrib.teaching import read
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.evidence import node_stats
from mars_jax.core.mesh import by_rows, size_of
from mars_jax.core.types import NO_TOKEN, LanguageModel, Params, PyTree, keys_from_seeds
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.by_name import check_finite
from mars_jax.drafters.ngram import load_ngram
from mars_jax.drafters.shared_tokens import shared_tokens, translated
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.training.eagle_training import drafted_ahead, entries
from mars_jax.models.heads import widen
from mars_jax.placement.hosts import fetch
from mars_jax.serve.likelihood import POSITIONS, ROWS, batches
from mars_jax.serve.prepare import bucket

PREFIXES = 64
"""Prefixes of a text that are drafted from together."""


class Text(NamedTuple):
    """A prompt and what the target has said after it."""

    tokens: tuple[int, ...]
    prompt: int  # tokens of the prompt

    @property
    def new(self) -> int:
        """T"""
        return len(self.tokens) - self.prompt


class Said(NamedTuple):
    """Judgement of a model about a token, from those before it."""

    log_p: Any  # f32[...]; of the token, at the temperature of the text
    rank: Any  # i32[...]; tokens that the model prefers to it
    best: Any  # i32[...]; the model's two best tokens
    second: Any  # i32[...]
    z1: Any  # f32[...]; raw logits of these two
    z2: Any  # f32[...]


class Drafted(NamedTuple):
    """A draft at every place of a text: entry [t, k] is of its k-th token where it begins after t new tokens and those
    before it were the text's; k may reach past the end."""

    rank: np.ndarray  # i32[T, K]; tokens that the draft prefers to the text's own; 0: it drafts that
    tokens: np.ndarray  # i32[T, K]; its first choice, NO_TOKEN where it drafts none
    log_q: (
        np.ndarray | None
    )  # f32[T, K]; of the text's token, at its temperature; None: a draft without a distribution


Reader = Callable[[Sequence[Text], float], list[Drafted]]
"""(texts, temperature) -> what a draft says along them."""


def reader(draft: str, target: Pretrained, places: int, *, dtype: str | None = None) -> Reader:
    """Make the reader of texts with a draft.

    Args:
      draft: as `drafters.load` takes it, of a kind that is in `READERS`.
      target: its target.
      places: K.
      dtype: of the draft's weights, as for `drafters.load`.

    Raises:
      MarsError: as `hub.load` and `shared_tokens`.
    """
    kind, path = specs.parse_draft(draft)
    return READERS[kind](Asked(target, path, places, None, False, dtype))


def along(target: Pretrained, texts: Sequence[Text], temperature: float) -> list[Said]:
    """Judgements of the target about the T new tokens of each text."""
    read = _read_texts(target.model, target.params, target, texts, temperature)
    return [
        Said(*(column[text.prompt - 1 : len(text.tokens) - 1] for column in said))
        for text, said in zip(texts, read, strict=True)
    ]


def _of_model(asked: Asked) -> Reader:
    target = asked.target
    draft = hub.load(asked.path, dtype=asked.dtype, mesh=target.mesh)
    check_finite(asked.path, draft.params)
    shared = shared_tokens(target, draft)
    params = draft.params if shared is None else shared._replace(weights=draft.params)
    model = _over_target(draft.model, target.config.vocab_size, shared is not None)

    def read(texts: Sequence[Text], temperature: float) -> list[Drafted]:
        found = _read_texts(model, params, target, texts, temperature)
        return [
            _placed(text, [said] * asked.chain, text.prompt - 1)
            for text, said in zip(texts, found, strict=True)
        ]

    return read


@functools.lru_cache
def _over_target(model: LanguageModel, vocab: int, own_tokens: bool) -> LanguageModel:
    """The model with logits of the target's tokens, -inf at those that it has not."""
    made = translated(model) if own_tokens else model

    def unembed(params: Any, hidden: Array) -> Array:
        logits = made.unembed(params, hidden)
        if own_tokens:
            return widen(logits, params.ids, vocab)
        short = max(vocab - model.vocab_size, 0)
        return jnp.pad(logits[..., :vocab], ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)

    return made._replace(unembed=unembed)


def _of_eagle(asked: Asked) -> Reader:
    target, places = asked.target, asked.chain
    config, params = hub.load_eagle(asked.path, target.config, target.params, dtype=asked.heads_dtype)
    check_finite(asked.path, params)
    both = Params(target=target.params, draft=asked.placed(params, config))
    # As in `drafters.eagle`: the head's keys and values are computed with in this.
    cache_dtype = "float32" if jax.default_backend() == "cpu" else params["fc"].dtype.name

    def read(texts: Sequence[Text], temperature: float) -> list[Drafted]:
        run = functools.partial(_read_head, config, target.model, places, cache_dtype, both)
        # One text at a time, as logits of all of its places are in memory together.
        found = _in_batches(run, target, texts, temperature, rows=1)
        # Entry t of the first step is about token t + 2, and says it from where token t + 1 is the last one.
        return [
            _placed(text, [Said(*(column[k] for column in said)) for k in range(places)], text.prompt - 2)
            for text, said in zip(texts, found, strict=True)
        ]

    return read


def _of_copies(load: Callable[[Asked], LoadedDrafter], asked: Asked) -> Reader:
    """Drafters without a state, whose drafts are a function of the text so far: every prefix is a row."""
    drafter, params = load(asked)[:2]

    def read(texts: Sequence[Text], temperature: float) -> list[Drafted]:
        return [along_prefixes(text) for text in texts]

    def along_prefixes(text: Text) -> Drafted:
        tokens = np.zeros(bucket(len(text.tokens)), np.int32)
        tokens[: len(text.tokens)] = text.tokens
        lengths = text.prompt + np.arange(text.new + -text.new % PREFIXES, dtype=np.int32)
        lengths = np.minimum(lengths, len(text.tokens)).reshape(-1, PREFIXES)
        drafted = np.asarray(_copied(drafter, Params(target=(), draft=params), tokens, lengths))[: text.new]
        place = np.add.outer(text.prompt + np.arange(text.new), np.arange(asked.chain))
        own = np.append(text.tokens, NO_TOKEN - 1)[np.minimum(place, len(text.tokens))]
        return Drafted((drafted != own).astype(np.int32), drafted, None)

    return read


@functools.partial(jax.jit, static_argnums=0)
def _copied(drafter: Drafter, params: Params, tokens: Array, lengths: Array) -> Array:
    """The drafts i32[n P, K] after the first tokens i32[L], as many as lengths i32[n, P] say."""

    def some(length: Array) -> Array:
        rows = jnp.broadcast_to(tokens[None], (PREFIXES, len(tokens)))
        given = DraftInput(
            keys=keys_from_seeds(jnp.zeros((PREFIXES,), jnp.uint32)),
            tokens=rows,
            length=length,
            controls=make_controls(PREFIXES, limit=len(tokens)),
        )
        state = drafter.init(params, rows, length)
        return drafter.propose(params, state, given)[0].tokens[:, 1:]

    return jax.lax.map(some, lengths).reshape(lengths.size, -1)


READERS: dict[str, Callable[[Asked], Reader]] = {
    "ngram": functools.partial(_of_copies, load_ngram),
    "model": _of_model,
    "eagle": _of_eagle,
    "replay": functools.partial(_of_copies, load_replay),
}
"""By the kind of the draft."""


def _placed(text: Text, said: Sequence[Said], first: int) -> Drafted:
    """The places of a draft, from entries whose number `first + t + k` of `said[k]` is about new token t + k.

    A head has no entry before a prompt's first token, so after a prompt of one its first draft counts as refused.
    """
    places = np.arange(len(said))
    entry = first + np.arange(text.new)[:, None] + places
    inside = (entry >= 0) & (entry < first + text.new)
    rank, best, log_q = (
        np.stack([getattr(one, name) for one in said])[places, np.where(inside, entry, 0)]
        for name in ("rank", "best", "log_p")
    )
    # What reaches past the text is refused there, and no step counts it.
    return Drafted(np.where(inside, rank, 1), best, np.where(inside, log_q, -np.inf))


def _read_texts(
    model: LanguageModel, params: PyTree, target: Pretrained, texts: Sequence[Text], temperature: float
) -> list[Said]:
    """Entry t of each text is about token t + 1."""
    return _in_batches(functools.partial(_read, model, params), target, texts, temperature, rows=ROWS)


def _in_batches(
    run: Callable[[Array, Array], Said],
    target: Pretrained,
    texts: Sequence[Text],
    temperature: float,
    rows: int,
) -> list[Said]:
    """Judgements by `run` of tokens i32[rows, L] at the temperature f32[rows], for each text."""
    found: list[Any] = [None] * len(texts)
    if target.mesh is not None:
        rows += -rows % size_of("data", target.mesh)
    for group, tokens in batches([text.tokens for text in texts], rows, target.config.max_positions):
        with target.on_mesh():
            divisor = jnp.full((len(tokens),), temperature or 1.0, jnp.float32)
            said = fetch(run(jnp.asarray(tokens), divisor))
        for row, i in enumerate(group):
            found[i] = Said(*(column[row] for column in said))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _read(model: LanguageModel, params, tokens, divisor):
    return by_rows(functools.partial(_read_rows, model))(params, tokens, divisor)


def _read_rows(model: LanguageModel, params, tokens, divisor):
    rows, length = tokens.shape
    hidden = read(model, params, tokens, jnp.zeros_like(tokens)).hidden
    # In parts, so that the logits of a whole text are never in memory together.
    size = min(POSITIONS, length)
    hidden = jnp.pad(hidden, ((0, 0), (0, -length % size), (0, 0)))
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1 + -length % size)))

    def part(first):
        logits = model.unembed(params, jax.lax.dynamic_slice_in_dim(hidden, first, size, axis=1))
        return about(logits, jax.lax.dynamic_slice_in_dim(following, first, size, axis=1), divisor)

    found = jax.lax.map(part, jnp.arange(0, hidden.shape[1], size, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, -1), found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _read_head(config, target: LanguageModel, places: int, cache_dtype: str, both, tokens, divisor):
    return by_rows(functools.partial(_read_head_rows, config, target, places, cache_dtype))(
        both, tokens, divisor
    )


def _read_head_rows(config, target: LanguageModel, places: int, cache_dtype: str, both, tokens, divisor):
    """Said [B, K, L - 1]; entry t of step k is about token t + 2, begun k tokens before."""
    model = target
    if config.feature_layers:
        assert target.with_features is not None  # of a target that has a checkpoint
        model = target.with_features(config.feature_layers)
    whole = jnp.zeros_like(tokens)  # one document
    output = entries(read(model, both.target, tokens, whole), tokens.shape[1] - 1)
    said = jnp.pad(tokens[:, 2:], ((0, 0), (0, 1)))
    steps = drafted_ahead(config, target, both, output, tokens, whole, places, cache_dtype)
    found = [about(config.widen(both, logits), said, divisor) for logits, _ in steps]
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *found)


def about(logits: Array, tokens: Array, divisor: Array) -> Said:
    """Judgements by logits f32[B, n, V] of tokens i32[B, n], at the temperature f32[B] of each row."""
    stats = node_stats(logits)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=2)
    ids = jnp.arange(logits.shape[2], dtype=jnp.int32)[None, None]
    # Equals go by their ids, as in an argmax and in top-k.
    preferred = (logits > own) | ((logits == own) & (ids < tokens[..., None]))
    log_p = own[..., 0] / divisor[:, None] - jax.nn.logsumexp(logits / divisor[:, None, None], axis=2)
    rank = jnp.sum(preferred, axis=2, dtype=jnp.int32)
    return Said(log_p, rank, stats.id1, stats.id2, stats.top1, stats.top2)
