"""A drafter by its name on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from mars_jax import specs
from mars_jax.core.errors import MarsError
from mars_jax.core.types import Drafter, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.eagle import load_eagle
from mars_jax.drafters.medusa import load_medusa
from mars_jax.drafters.model import load_model
from mars_jax.drafters.ngram import ngram
from mars_jax.drafters.none import none
from mars_jax.drafters.shapes import Dynamic
from mars_jax.pretrained import Pretrained

LOADERS: Mapping[str, Callable[[Asked], LoadedDrafter]] = {
    "none": lambda asked: LoadedDrafter(none(), ()),
    "ngram": lambda asked: LoadedDrafter(ngram(asked.chain), ()),
    "model": load_model,
    "eagle": load_eagle,
    "medusa": load_medusa,
}
"""By the name of a row of `specs.DRAFTERS`, from what is asked for to the drafter with its weights."""

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
    if tree is not None and num_draft_tokens is not None:
        raise MarsError(
            "num_draft_tokens does not apply to a tree, whose depth is its own: leave one of them out."
        )
    if row.grows and tree is None and num_draft_tokens is None and not sample:
        tree = Dynamic()
    loaded = LOADERS[kind](Asked(target, path, length, tree, sample, dtype))
    _check_finite(path, loaded.params)
    return loaded


def _check_finite(name: str, params: PyTree) -> None:
    """A target that is no number shows in its text; a draft would only ever be rejected, so look at its weights."""
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(weight.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(weight))):
            place = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"the weights of the draft '{name}' are not finite ({place}): load an intact checkpoint."
            )
