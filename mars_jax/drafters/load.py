"""A drafter by its name on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax import hub, specs
from mars_jax.core.errors import MarsError
from mars_jax.core.types import Drafter, PyTree
from mars_jax.drafters.eagle import eagle
from mars_jax.drafters.medusa import medusa
from mars_jax.drafters.model import language_model
from mars_jax.drafters.ngram import ngram
from mars_jax.drafters.none import none
from mars_jax.drafters.shapes import Dynamic
from mars_jax.hub.heads.eagle_files import load_eagle
from mars_jax.hub.heads.medusa_files import load_medusa
from mars_jax.placement.shardings import place
from mars_jax.pretrained import Pretrained, check_same_vocabulary


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
    tree: Sequence[int] | Dynamic | None = None,
    sample: bool = False,
    dtype: str | None = None,
) -> LoadedDrafter:
    """The drafter that `spec` names, paired with `target`.

    Args:
      spec: `none`, `ngram`, or with a directory or hub name `model:PATH`, a small language model, `eagle:PATH`, an
        EAGLE head of the target, or `medusa:PATH`, Medusa heads of the target.
      target: the model it drafts for; the vocabularies must agree. The draft is divided over its mesh.
      num_draft_tokens: chain length; default 5 for a model, all heads for Medusa, and 8 for n-grams, which cost
        nothing to draft.
      tree: children per node at each depth, or, not for Medusa, `Dynamic(...)`; default: chains, and `Dynamic()` for
        EAGLE unless a chain's length is given.
      sample: draw the chain from the draft and hand over the true q, for `verify.rejection`. EAGLE then drafts a
        chain, of 5 unless its length is given.
      dtype: of the draft's weights; default: of a model the checkpoint's own, of heads the target's.

    Raises:
      MarsError: unknown spec, an argument that the drafter does not take, a draft that does not fit the target.

    >>> load("ngram", None, num_draft_tokens=4).drafter.num_nodes
    5
    """
    parsed = specs.parse_draft(spec)
    (kind, path), row = parsed, parsed.row
    length = row.length if num_draft_tokens is None else num_draft_tokens
    unused = {"tree": (tree is not None, "trees"), "sample": (sample, "samples")}
    for name, (given, what) in unused.items():
        if given and not getattr(row, what):
            raise MarsError(
                f"{name} does not apply to the drafter '{kind}': leave it out, or draft with "
                f"{specs.drafters_that(what)}."
            )
    if kind == "none" and num_draft_tokens is not None:
        raise MarsError("num_draft_tokens does not apply to the drafter 'none': leave it out.")
    if kind in ("none", "ngram"):
        return LoadedDrafter(none() if length is None else ngram(length), ())
    if tree is not None and num_draft_tokens is not None:
        raise MarsError(
            "num_draft_tokens does not apply to a tree, whose depth is its own: leave one of them out."
        )
    if kind == "model":
        assert length is not None
        draft = hub.load(path, dtype=dtype, mesh=target.mesh)
        check_same_vocabulary(target, draft)
        params = draft.params
        drafter = language_model(
            draft.model,
            length,
            tree=tree,
            sample=sample,
            vocab_size=target.config.vocab_size,
        )
    elif kind == "eagle":
        assert length is not None
        if row.grows and tree is None and num_draft_tokens is None and not sample:
            tree = Dynamic()
        config, params = load_eagle(path, target.config, target.params, dtype=dtype or _dtype(target))
        # As in `hub.load`: XLA's CPU backend would widen a bfloat16 cache anew at every step.
        cache_dtype = "float32" if jax.default_backend() == "cpu" else params["fc"].dtype.name
        drafter = eagle(config, target.model, length, tree=tree, sample=sample, cache_dtype=cache_dtype)
    else:
        config, params = load_medusa(path, target.config, dtype=dtype or _dtype(target))
        drafter = medusa(config, target.model, num_draft_tokens, tree=tree, sample=sample)
    if kind != "model" and target.mesh is not None:
        params = place(params, config, target.mesh)
    _check_finite(path, params)
    return LoadedDrafter(drafter, params)


def _dtype(target: Pretrained) -> str:
    """Heads compute with what the target gives them."""
    return target.params["embed"].dtype.name


def _check_finite(name: str, params: PyTree) -> None:
    """A target that is no number shows in its text; a draft would only ever be rejected, so look at its weights."""
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(weight.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(weight))):
            place = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"the weights of the draft '{name}' are not finite ({place}): load an intact checkpoint."
            )
