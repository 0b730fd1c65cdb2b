"""A draft model whose tokenizer is not its target's: it drafts the tokens that both have, by tables in its params.

Source: token-level intersection (TLI), Timor et al. 2502.05202. B batch, N nodes, U vocabulary of the draft, V of the
target. Oracle: the model itself, asked token by token in Python (tests/drafters/test_shared_tokens.py).

What the target lacks has no probability in a draft, and the rest is renormalised, so q is true and no rule knows. The
draft reads the target's tokens one by one, which costs acceptance and no exactness: a tokenizer of its own would have
cut the text in other places, and what it has no token for is read by its end alone.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.constraints.vocabulary import Vocabulary, vocabulary
from mars_jax.core.errors import MarsError
from mars_jax.core.types import NO_TOKEN, ForwardOutput, LanguageModel, PyTree, Visible
from mars_jax.hub.pretrained import Pretrained, differing_tokens

FEWEST = 100
"""Shared tokens. Any two vocabularies with all single bytes have 256, and a draft of less says next to nothing."""


class Shared(NamedTuple):
    """`Params.draft` of a model with a tokenizer of its own; the tables are whole on every device."""

    weights: PyTree  # of the model; None where only the tables were made
    ids: Array  # i32[U]; the target's token for each of the draft's; NO_TOKEN where it has none
    fed: Array  # i32[V]; the draft's token as which it reads each of the target's

    @property
    def count(self) -> int:
        """Tokens that both vocabularies have."""
        return int(np.sum(np.asarray(self.ids) >= 0))


@functools.lru_cache
def translated(model: LanguageModel) -> LanguageModel:
    """Return the model with params `Shared`: it reads the target's tokens, and its logits are -inf at unshared ones."""

    def forward(params: Shared, tokens: Array, visible: Visible, cache: PyTree) -> ForwardOutput:
        return model.forward(params.weights, params.fed[tokens], visible, cache)

    def unembed(params: Shared, hidden: Array) -> Array:
        return jnp.where(params.ids >= 0, model.unembed(params.weights, hidden), -jnp.inf)

    return model._replace(forward=forward, unembed=unembed, embed=None, with_features=None, with_layers=None)


def shared_tokens(target: Pretrained, draft: Pretrained) -> Shared | None:
    """Return the tables of a pair, without weights; None where both have one vocabulary and need none.

    A token is shared where its bytes are equal, a special token where its name is.

    Raises:
      MarsError: fewer than `FEWEST` tokens are shared, or as `hub.pretrained.differing_tokens`.

    >>> from mars_jax import hub
    >>> shared_tokens(hub.outline("tiny/target"), hub.outline("tiny/draft")) is None
    True
    """
    if not differing_tokens(target, draft):
        return None
    said, read = (vocabulary(model.tokenizer, model.config.vocab_size) for model in (target, draft))
    made = tables(said, read, stand_in=draft.config.bos_token_id or 0)
    if made.count < FEWEST:
        raise MarsError(
            f"the draft '{draft.name}' and the target '{target.name}' share {made.count} tokens, and drafting needs "
            f"{FEWEST}: pair models whose tokenizers are more alike."
        )
    return made


def tables(target: Vocabulary, draft: Vocabulary, stand_in: int = 0) -> Shared:
    """Return the tables of two vocabularies.

    Args:
      target, draft: of V and of U tokens.
      stand_in: the draft's token for those of the target of which it cannot even read the last byte.

    >>> made = tables(Vocabulary((None, b"a", b"b", b"ab")), Vocabulary((b"b", b"c", b"a")))
    >>> made.ids.tolist(), made.fed.tolist()
    ([2, -1, 1], [0, 2, 0, 0])
    """
    ours, theirs = _numbers(target), _numbers(draft)
    ids = np.full(len(draft.tokens), NO_TOKEN, np.int32)
    for word in ours.keys() & theirs.keys():
        ids[theirs[word]] = ours[word]
    fed = np.full(len(target.tokens), stand_in, np.int32)
    for number, token in enumerate(target.tokens):
        # What comes next follows the end of a token, so that is what is read of one that the draft lacks.
        ends = ((False, token[at:]) for at in range(len(token))) if token else ()
        fed[number] = next((theirs[end] for end in ends if end in theirs), stand_in)
    for number, mark in target.marks:
        fed[number] = theirs.get((True, mark), stand_in)
    return Shared(None, jnp.asarray(ids), jnp.asarray(fed))


def _numbers(words: Vocabulary) -> dict[tuple[bool, bytes], int]:
    """Return the ids of texts, and of special tokens by (True, name); the first id where several say the same."""
    found = {(False, token): i for i, token in reversed(list(enumerate(words.tokens))) if token}
    return found | {(True, mark): i for i, mark in words.marks}
