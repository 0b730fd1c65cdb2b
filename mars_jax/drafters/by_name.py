"""Loading of drafters by spec, such as `eagle:PATH`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.drafter import Drafter
from mars_jax.core.types import PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.registry import HEAD_EMBED, drafters_that, parse_draft
from mars_jax.drafters.sized import sized
from mars_jax.drafters.tree_shapes import Dynamic, checked_tree, parse_tree
from mars_jax.hub.pretrained import Pretrained, check_pretrained
from mars_jax.models.config import ModelConfig
from mars_jax.utils.errors import MarsError, check_switch, check_type, short_repr
from mars_jax.utils.settings import BATCH, check_dtype

AnyDrafter = LoadedDrafter | Drafter | str
"""A drafter as `mars_jax.generate` accepts it: a spec, or a drafter with or without weights."""


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
    """Load the drafter given by `spec` and pair it with `target`.

    Args:
      spec: `none`, `ngram` or `self`; `mtp` for the MTP module in the target's checkpoint; `replay:FILE` with a file of
        earlier answers; or, with a directory or hub name, `model:PATH` for a small language model, `eagle:PATH` for an
        EAGLE head of the target, `mtp:PATH` for its MTP module, `medusa:PATH` for its Medusa heads, `dflash:PATH` for
        its DFlash or DSpark head, or a system that accepts some drafts without verification and is therefore never
        lossless: `sprinter:PATH`, `trispec:PATH` or `via_sd:PATH`.
      target: the model to draft for. Heads and systems must share its vocabulary. The draft is sharded over its mesh.
      num_draft_tokens: chain length; default 5 for a model or `self`, 3 for MTP, all heads for Medusa, the whole block
        for DFlash, 8 for n-grams, which cost nothing to draft, 20 for SPRINTER, and 24 for TriSpec and VIA-SD. For a
        target that is a mixture of experts the default is at most 3, because each node reads different experts;
        SPRINTER, TriSpec and VIA-SD keep their defaults.
      tree: children per node at each depth, `Dynamic(...)` (not for Medusa), or either as a string, such as "4-2-2-1"
        or "dynamic". Default: `Dynamic()` for EAGLE, and for DFlash a dynamic tree as deep as its block, unless a
        chain length is given or the target is a mixture of experts or has recurrent layers; otherwise a chain.
      sample: draw the chain from the draft and pass the true q to `verify.rejection`. EAGLE then drafts a
        chain, of 5 tokens unless a length is given.
      dtype: dtype of the draft's weights; default: the checkpoint's for a model, the target's for heads.
      draft_size: "fixed", or "auto": each step drafts the full chain, half of it or nothing, whichever is estimated to
        be fastest; see `drafters.sized`. Available for n-grams, models, EAGLE heads and MTP (as chains) and replay.
      any_rule: with "auto", also allow lossy rules, whose output then depends on the other rows of the batch.
      head_embed: for EAGLE and DFlash heads: "own" reads the embedding in the head's checkpoint, if there is one;
        "target" reads the target's instead.

    Raises:
      MarsError: unknown spec, an argument that does not apply to the drafter, a draft that does not fit the target.

    >>> load("ngram", None, num_draft_tokens=4).drafter.num_nodes
    5
    """
    if target is not None:
        check_pretrained(target)
    if isinstance(tree, str):
        tree = parse_tree(tree, shown="tree")
    if num_draft_tokens is not None:
        BATCH["num_draft_tokens"].check(num_draft_tokens)
    if tree is not None:
        tree = checked_tree(tree)
    check_type("the drafter", spec, str, "its spec, such as 'ngram'")
    check_switch("sample", sample)
    check_switch("any_rule", any_rule)
    check_dtype(dtype)
    draft_spec = parse_draft(spec)
    (kind, path), draft_definition = draft_spec, draft_spec.definition
    # A user's model may have a config of a different type.
    is_mixture = target is not None and getattr(target.config, "num_experts", 0) > 0
    if not (isinstance(draft_size, str) and draft_size in ("fixed", "auto")):
        raise MarsError(f"draft_size is {short_repr(draft_size)}: expected 'fixed' or 'auto'.")
    if not (isinstance(head_embed, str) and head_embed in HEAD_EMBED):
        raise MarsError(f"head_embed is {short_repr(head_embed)}: expected one of {', '.join(HEAD_EMBED)}.")
    if any_rule and draft_size == "fixed":
        raise MarsError(
            "any_rule does not apply to drafts of a fixed size, which work with every rule: leave it out."
        )
    if draft_size == "auto" and (tree is not None or not draft_definition.resizes):
        subject = f"the drafter '{kind}'" if tree is None else "trees"
        raise MarsError(
            f"draft_size='auto' does not apply to {subject}: draft a chain with {drafters_that('resizes')}."
        )
    is_recurrent = target is not None and target.model.for_chains is not None
    must_chain = sample or draft_size == "auto" or is_recurrent
    length, usual_tree = draft_definition.usual(mixture=is_mixture, chain=must_chain)
    # Name: (whether the caller set it, the field of the definition that allows it).
    optional_arguments = {
        "tree": (tree is not None, "trees"),
        "sample": (sample, "samples"),
        "head_embed": (head_embed != "own", "embeds"),
    }
    for name, (is_set, ability) in optional_arguments.items():
        if is_set and not getattr(draft_definition, ability):
            raise MarsError(
                f"{name} does not apply to the drafter '{kind}': leave it out, or draft with "
                f"{drafters_that(ability)}."
            )
    if draft_definition.head and not isinstance(target.config, ModelConfig):
        raise MarsError(
            f"'{target.name}' has no config, by which the heads of '{path or kind}' are checked: pass "
            "one to Pretrained.from_parts, or call the constructor of the drafter."
        )
    if kind == "none" and num_draft_tokens is not None:
        raise MarsError("num_draft_tokens does not apply to the drafter 'none': leave it out.")
    if tree is not None and num_draft_tokens is not None:
        raise MarsError(
            "num_draft_tokens does not apply to a tree, which has its own depth: leave one of them out."
        )
    # A length overrides the usual tree, so EAGLE then drafts a chain.
    if num_draft_tokens is not None:
        length = num_draft_tokens
    elif tree is None:
        tree = usual_tree
    loaded_drafter = draft_definition.load(Asked(target, path, length, tree, sample, dtype, head_embed))
    check_finite_weights(path or kind, loaded_drafter.params)
    return sized(loaded_drafter, any_rule=any_rule) if draft_size == "auto" else loaded_drafter


def loaded(drafter: AnyDrafter, target: Pretrained) -> LoadedDrafter:
    """Return a drafter with its weights from any form that `generate` accepts.

    >>> from mars_jax.drafters import none
    >>> loaded(none(), None).params
    ()
    """
    if isinstance(drafter, str):
        return load(drafter, target)
    if isinstance(drafter, Drafter):
        return LoadedDrafter(drafter, ())
    if isinstance(drafter, LoadedDrafter):
        return drafter
    raise MarsError(
        f"the drafter is of type {type(drafter).__name__}: give a spec such as 'ngram', or the result of "
        "mars_jax.drafters.load."
    )


@jax.jit
def _are_finite(weights: list[Array]) -> list[Array]:
    """Return for each weight whether all its entries are finite.

    All weights share one program, because a launch costs more than the check.
    """
    return [jnp.all(jnp.isfinite(weight)) for weight in weights]


def _on_host(weight: Array | np.ndarray) -> bool:
    """Return whether this process can read a weight without a copy from a device."""
    if not isinstance(weight, Array):
        return True
    return weight.is_fully_addressable and all(device.platform == "cpu" for device in weight.devices())


def _is_finite(weight: Array | np.ndarray) -> bool:
    """Check one weight in host memory, without compiling a program."""
    host_weight = np.asarray(weight)
    if host_weight.dtype == jnp.bfloat16:
        # Infinities and NaNs have all eight exponent bits set.
        return not np.any(host_weight.view(np.uint16) & 0x7F80 == 0x7F80)
    return bool(np.all(np.isfinite(host_weight)))


def check_finite_weights(name: str, params: PyTree) -> None:
    """Raise MarsError if any weight of a draft is infinite or NaN.

    Bad target weights show in the output. Bad draft weights would only cause every draft to be rejected, so check them.
    """
    named_weights = [
        (path, weight)
        for path, weight in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(weight.dtype, jnp.floating)
    ]
    weights = [weight for _, weight in named_weights]
    # A draft on a CPU is checked without compiling.
    if all(map(_on_host, weights)):
        are_finite = map(_is_finite, weights)
    else:
        are_finite = jax.device_get(_are_finite(weights))
    for (path, _), is_finite in zip(named_weights, are_finite, strict=True):
        if not is_finite:
            location = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"the weights of the draft '{name}' are not finite ({location}): load an intact checkpoint."
            )
