"""Drafting with a model whose tokenizer differs from the target's, restricted to tokens in both vocabularies.

Source: token-level intersection (TLI), Timor et al. 2502.05202. B batch, N nodes, U draft vocabulary, V target
vocabulary. Tested against the model itself, run token by token in Python (tests/drafters/test_shared_tokens.py).

Tokens that the target lacks get probability 0 and q is renormalised, so q is the true sampling distribution and every
rule works unchanged. The draft model is fed the target's tokens, although its own tokenizer would split the text
differently. A token that the draft vocabulary lacks is replaced by the draft token for the longest possible suffix of
its bytes. Both differences lower the acceptance rate but do not affect correctness.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.constraints.vocabulary import Vocabulary, vocabulary
from mars_jax.core.types import NO_TOKEN, ForwardOutput, LanguageModel, PyTree, Visible
from mars_jax.hub.pretrained import Pretrained, differing_tokens
from mars_jax.utils.errors import MarsError

FEWEST = 100
"""Minimum number of shared tokens. Byte-level vocabularies share at least the 256 single bytes. With fewer than
`FEWEST` shared tokens, drafts are hardly ever accepted."""


class Shared(NamedTuple):
    """`Params.draft` for a draft model with a different tokenizer. The tables are replicated on every device."""

    weights: PyTree  # weights of the draft model; None before they are added to the tables
    ids: Array  # i32[U]; target token id for each draft token id; NO_TOKEN if the target lacks it
    fed: Array  # i32[V]; draft token id to feed for each target token id

    @property
    def count(self) -> int:
        """Number of shared tokens."""
        return int(np.sum(np.asarray(self.ids) >= 0))


@functools.lru_cache
def translated(model: LanguageModel) -> LanguageModel:
    """Wrap a model so that it takes `Shared` params and target token ids.

    Tokens that are not shared get logits of -inf.
    """

    def forward(params: Shared, tokens: Array, visible: Visible, cache: PyTree) -> ForwardOutput:
        return model.forward(params.weights, params.fed[tokens], visible, cache)

    def unembed(params: Shared, hidden: Array) -> Array:
        return jnp.where(params.ids >= 0, model.unembed(params.weights, hidden), -jnp.inf)

    return model._replace(forward=forward, unembed=unembed, embed=None, with_features=None, with_layers=None)


def shared_tokens(target: Pretrained, draft: Pretrained) -> Shared | None:
    """Return the token tables of two models, without weights; None if both models have the same vocabulary.

    Ordinary tokens are shared if they have the same bytes, and special tokens if they have the same name.

    Raises:
      MarsError: fewer than `FEWEST` tokens are shared; see also `hub.pretrained.differing_tokens`.

    >>> from mars_jax import hub
    >>> shared_tokens(hub.outline("tiny/target"), hub.outline("tiny/draft")) is None
    True
    """
    if not differing_tokens(target, draft):
        return None
    target_tokens, draft_tokens = (
        vocabulary(model.tokenizer, model.config.vocab_size) for model in (target, draft)
    )
    token_tables = tables(target_tokens, draft_tokens, stand_in=draft.config.bos_token_id or 0)
    if token_tables.count < FEWEST:
        raise MarsError(
            f"the draft '{draft.name}' and the target '{target.name}' share {token_tables.count} tokens, and drafting "
            f"needs {FEWEST}: pair models whose tokenizers are more alike."
        )
    return token_tables


def tables(target: Vocabulary, draft: Vocabulary, stand_in: int = 0) -> Shared:
    """Return the tables that map between the tokens of two vocabularies. Their field `weights` is None.

    Args:
      target, draft: the vocabularies, of V and U tokens.
      stand_in: draft token id to feed for a target token if no suffix of its bytes is in the draft's vocabulary.

    >>> shared = tables(Vocabulary((None, b"a", b"b", b"ab")), Vocabulary((b"b", b"c", b"a")))
    >>> shared.ids.tolist(), shared.fed.tolist()
    ([2, -1, 1], [0, 2, 0, 0])
    """
    # Two tokens are the same if their keys are equal. Keys are the bytes of ordinary tokens and the names of special
    # ones.
    target_ids, draft_ids = _ids_of_bytes(target), _ids_of_bytes(draft)
    to_target = np.full(len(draft.tokens), NO_TOKEN, np.int32)
    for key in target_ids.keys() & draft_ids.keys():
        to_target[draft_ids[key]] = target_ids[key]
    to_draft = np.full(len(target.tokens), stand_in, np.int32)
    for i, token in enumerate(token or b"" for token in target.tokens):
        # Feed the draft token that matches the most bytes at the end of the target's token, because the next token
        # depends most on the last bytes.
        suffixes = ((False, token[start:]) for start in range(len(token)))
        to_draft[i] = next((draft_ids[suffix] for suffix in suffixes if suffix in draft_ids), stand_in)
    # For a special token, feed the draft's special token of the same name, or `stand_in` if there is none.
    for i, special_name in target.marks:
        to_draft[i] = draft_ids.get((True, special_name), stand_in)
    return Shared(None, jnp.asarray(to_target), jnp.asarray(to_draft))


def _ids_of_bytes(words: Vocabulary) -> dict[tuple[bool, bytes], int]:
    """Map each token's key to its id. Keys are (False, bytes) for ordinary tokens and (True, name) for special ones.

    If several tokens have the same bytes, use the first id.
    """
    ordinary_ids = {(False, token): i for i, token in reversed(list(enumerate(words.tokens))) if token}
    return ordinary_ids | {(True, special_name): i for i, special_name in words.marks}
