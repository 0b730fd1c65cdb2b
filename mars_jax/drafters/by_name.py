"""A drafter by its name on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax import specs
from mars_jax.core.drafter import Drafter
from mars_jax.core.errors import MarsError, check_switch, check_type, short_repr
from mars_jax.core.types import PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.sized import sized
from mars_jax.drafters.tree_shapes import Dynamic, checked_tree
from mars_jax.hub.pretrained import Pretrained, check_pretrained
from mars_jax.models.config import ModelConfig

AnyDrafter = LoadedDrafter | Drafter | str
"""A drafter as `mars_jax.generate` takes it: a spec, or a drafter with or without weights of its own."""


def load(
    spec: str,
    target: Pretrained,
    *,
    num_draft_tokens: int | None = None,
    tree: Sequence[int] | Dynamic | str | None = None,
    sample: bool = False,
    dtype: str | None = None,
    draft_size: str = "fixed",
    any_rule: bool = False,
    head_embed: str = "own",
) -> LoadedDrafter:
    """The drafter that `spec` names, paired with `target`.

    Args:
      spec: `none`, `ngram`, `self`, with a file of earlier answers `replay:FILE`, or with a directory or hub name
        `model:PATH`, a small language model, `eagle:PATH`, an EAGLE head of the target, `medusa:PATH`, Medusa heads,
        `dflash:PATH`, its DFlash or DSpark head, or `sprinter:PATH`, `trispec:PATH` or `via_sd:PATH`, systems that
        vouch for their own drafts, so that no rule is lossless with them.
      target: the model it drafts for; heads and systems need its vocabulary. The draft is divided over its mesh.
      num_draft_tokens: chain length; default 5 for a model or `self`, all heads for Medusa, the whole block for DFlash,
        8 for n-grams, which cost nothing to draft, 20 for SPRINTER, and 24 for TriSpec and VIA-SD; for a target that is
        a mixture of experts at most 3 where the target tests every token, since every node reads experts of its own.
      tree: children per node at each depth, or, not for Medusa, `Dynamic(...)`, or either as text, such as "4-2-2-1"
        and "dynamic"; default: chains, and `Dynamic()` for
        EAGLE unless a chain's length is given or the target is a mixture, and for DFlash one as deep as
        its block.
      sample: draw the chain from the draft and hand over the true q, for `verify.rejection`. EAGLE then drafts a
        chain, of 5 unless its length is given.
      dtype: of the draft's weights; default: of a model the checkpoint's own, of heads the target's.
      draft_size: "fixed", or "auto": each step drafts all of the chain, half of it or nothing, as pays then; see
        `drafters.sized`. For n-grams, models, EAGLE heads, which then draft a chain, and replay.
      any_rule: with "auto", lossy rules too, whose texts then depend on what else is in the batch.
      head_embed: of EAGLE and DFlash heads, "own" to read the embedding in the head's checkpoint, if there is one, or
        "target" to read the target's in its place.

    Raises:
      MarsError: unknown spec, an argument that the drafter does not take, a draft that does not fit the target.

    >>> load("ngram", None, num_draft_tokens=4).drafter.num_nodes
    5
    """
    if target is not None:
        check_pretrained(target)
    if isinstance(tree, str):
        tree = specs.parse_tree(tree, shown="tree")
    if num_draft_tokens is not None:
        specs.REQUEST["num_draft_tokens"].check(num_draft_tokens)
    if tree is not None:
        tree = checked_tree(tree)
    check_type("the drafter", spec, str, "its spec, such as 'ngram'")
    for name, value in {"sample": sample, "any_rule": any_rule}.items():
        check_switch(name, value)
    specs.check_dtype(dtype)
    parsed = specs.parse_draft(spec)
    (kind, path), row = parsed, parsed.row
    # A model of one's own may have another config than ours.
    mixture = target is not None and getattr(target.config, "num_experts", 0) > 0
    if not (isinstance(draft_size, str) and draft_size in ("fixed", "auto")):
        raise MarsError(f"draft_size is {short_repr(draft_size)}: expected 'fixed' or 'auto'.")
    if not (isinstance(head_embed, str) and head_embed in specs.HEAD_EMBED):
        raise MarsError(
            f"head_embed is {short_repr(head_embed)}: expected one of {', '.join(specs.HEAD_EMBED)}."
        )
    if any_rule and draft_size == "fixed":
        raise MarsError(
            "any_rule does not apply to drafts of a fixed size, which no text depends on: leave it out."
        )
    if draft_size == "auto" and (tree is not None or not row.resizes):
        what = "trees" if tree is not None else f"the drafter '{kind}'"
        raise MarsError(
            f"draft_size='auto' does not apply to {what}: draft a chain with {specs.drafters_that('resizes')}."
        )
    length, usual_tree = row.usual(mixture=mixture, sample=sample or draft_size == "auto")
    unused = {
        "tree": (tree is not None, "trees"),
        "sample": (sample, "samples"),
        "head_embed": (head_embed != "own", "embeds"),
    }
    for name, (given, what) in unused.items():
        if given and not getattr(row, what):
            raise MarsError(
                f"{name} does not apply to the drafter '{kind}': leave it out, or draft with "
                f"{specs.drafters_that(what)}."
            )
    if row.head and not isinstance(target.config, ModelConfig):
        raise MarsError(
            f"'{target.name}' has no config, by which the heads of '{path}' are checked: give Pretrained.from_parts "
            "one, or make the drafter by its own factory, such as mars_jax.drafters.eagle."
        )
    if kind == "none" and num_draft_tokens is not None:
        raise MarsError("num_draft_tokens does not apply to the drafter 'none': leave it out.")
    if tree is not None and num_draft_tokens is not None:
        raise MarsError(
            "num_draft_tokens does not apply to a tree, whose depth is its own: leave one of them out."
        )
    if num_draft_tokens is not None:
        length = num_draft_tokens
    elif tree is None:
        tree = usual_tree
    made = specs.factory(row.loader)(Asked(target, path, length, tree, sample, dtype, head_embed))
    check_finite(path, made.params)
    return sized(made, any_rule=any_rule) if draft_size == "auto" else made


def loaded(drafter: AnyDrafter, target: Pretrained) -> LoadedDrafter:
    """A drafter with its weights, of any form that `generate` takes.

    >>> from mars_jax.drafters import none
    >>> loaded(none(), None).params
    ()
    """
    if isinstance(drafter, str):
        return load(drafter, target)
    if not isinstance(drafter, Drafter | LoadedDrafter):
        raise MarsError(
            f"the drafter is of type {type(drafter).__name__}: give a spec such as 'ngram', or what "
            "mars_jax.drafters.load gives."
        )
    return LoadedDrafter(drafter, ()) if isinstance(drafter, Drafter) else drafter


@jax.jit
def _are_finite(weights: list[Array]) -> list[Array]:
    """Returns one bool per weight. All weights share one program, because launching costs more than the check."""
    return [jnp.all(jnp.isfinite(weight)) for weight in weights]


def _on_cpu(weight: Any) -> bool:
    return not isinstance(weight, Array) or all(d.platform == "cpu" for d in weight.devices())


def _is_finite(weight: Any) -> bool:
    """Check one weight in the host's memory, where nothing is compiled."""
    host = np.asarray(weight)
    if host.dtype == jnp.bfloat16:  # of whose bits the second to ninth are the exponent
        return not np.any(host.view(np.uint16) & 0x7F80 == 0x7F80)
    return bool(np.all(np.isfinite(host)))


def check_finite(name: str, params: PyTree) -> None:
    """Raise MarsError for weights that are no numbers. Those of a target show in its text; a draft would only ever be
    rejected, so look at its weights."""
    weights = [
        (path, weight)
        for path, weight in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(weight.dtype, jnp.floating)
    ]
    arrays = [weight for _, weight in weights]
    on_host = all(getattr(x, "is_fully_addressable", True) and _on_cpu(x) for x in arrays)
    found = map(_is_finite, arrays) if on_host else jax.device_get(_are_finite(arrays))
    for (path, _), finite in zip(weights, found, strict=True):
        if not finite:
            place = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"the weights of the draft '{name}' are not finite ({place}): load an intact checkpoint."
            )
