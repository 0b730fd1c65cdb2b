"""A drafter by its name on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.drafters.model import language_model
from mars_jax.drafters.ngram import ngram
from mars_jax.drafters.none import none
from mars_jax.errors import MarsError
from mars_jax.text import Pretrained, check_same_vocabulary
from mars_jax.text import load as load_pretrained
from mars_jax.types import Drafter, PyTree

SPECS = "none, ngram, model:PATH"


class LoadedDrafter(NamedTuple):
    """A drafter and its weights."""

    drafter: Drafter
    params: PyTree


AnyDrafter = LoadedDrafter | Drafter | str
"""What `mars_jax.generate` takes: a spec, or a drafter with or without weights of its own."""


def load(
    spec: str,
    target: Pretrained,
    *,
    num_draft_tokens: int | None = None,
    tree: Sequence[int] | None = None,
    sample: bool = False,
    dtype: str | None = None,
) -> LoadedDrafter:
    """The drafter that `spec` names, paired with `target`.

    Args:
      spec: `none`, `ngram`, or `model:PATH` with a directory or hub name of a small language model.
      target: the model it drafts for; the vocabularies must agree.
      num_draft_tokens: chain length; default 5 for a model and 8 for n-grams, which cost nothing to draft.
      tree: children per node at each depth, for a model.
      sample: let a model sample its chain and hand over the true q, for `verify.rejection`.
      dtype: of the draft model's weights; default: the checkpoint's own.

    Raises:
      MarsError: unknown spec, an argument that the drafter does not take, vocabularies that differ.

    >>> load("ngram", None, num_draft_tokens=4).drafter.num_nodes
    5
    """
    kind, _, path = spec.partition(":")
    if kind in ("none", "ngram") and not path:
        unused = {"tree": tree is not None, "sample": sample}
        if kind == "none":
            unused["num_draft_tokens"] = num_draft_tokens is not None
        for name, given in unused.items():
            if given:
                raise MarsError(
                    f"{name} does not apply to the drafter '{kind}': leave it out, or draft with model:PATH."
                )
        return LoadedDrafter(none() if kind == "none" else ngram(_or(num_draft_tokens, 8)), ())
    if kind != "model" or not path:
        raise MarsError(f"unknown drafter '{spec}': choose one of {SPECS}.")
    if tree is not None and num_draft_tokens is not None:
        raise MarsError(
            "num_draft_tokens does not apply to a tree, whose depth is its own: leave one of them out."
        )
    draft = load_pretrained(path, dtype=dtype)
    check_same_vocabulary(target, draft)
    _check_finite(draft)
    drafter = language_model(
        draft.model,
        _or(num_draft_tokens, 5),
        tree=tree,
        sample=sample,
        vocab_size=target.config.vocab_size,
    )
    return LoadedDrafter(drafter, draft.params)


def _check_finite(draft: Pretrained) -> None:
    """A target that is no number shows in its text; a draft would only ever be rejected, so look at its weights."""
    for path, weight in jax.tree_util.tree_leaves_with_path(draft.params):
        if not bool(jnp.all(jnp.isfinite(weight))):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"the weights of the draft '{draft.name}' are not finite ({name}): load an intact checkpoint."
            )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
