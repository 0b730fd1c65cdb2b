"""Functions that load a drafter from a spec such as `eagle:PATH`."""

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
"""The types of drafter that `mars_jax.generate` accepts: a spec, or a drafter with or without weights."""


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
    """Load the drafter that `spec` names and check that it fits `target`.

    Args:
      spec: one of `none`, `ngram`, `self` (the target with 8-bit weights), `mtp` (the MTP module in the target's
        checkpoint) and `replay:FILE` (a file of earlier answers). In the other specs, PATH is a directory or hub name:
        `model:PATH` for a small language model, `eagle:PATH` for an EAGLE head, `mtp:PATH` for an MTP module,
        `medusa:PATH` for Medusa heads, and `dflash:PATH` for a DFlash or DSpark head. SPRINTER, TriSpec and VIA-SD
        (`sprinter:PATH`, `trispec:PATH` and `via_sd:PATH`) accept some draft tokens without verification and are
        therefore never lossless.
      target: the model to draft for. Heads, and the drafters of SPRINTER, TriSpec and VIA-SD, must share the target's
        vocabulary. The drafter's weights are sharded over the target's mesh.
      num_draft_tokens: chain length. Default: 5 for a model, EAGLE or `self`, 3 for MTP, the number of heads for
        Medusa, a whole block for DFlash, 8 for n-grams and replay, 20 for SPRINTER, and 24 for TriSpec and VIA-SD. If
        the target is a mixture of experts, the default is at most 3, because each draft token activates different
        experts. SPRINTER, TriSpec and VIA-SD ignore this limit.
      tree: children per node at each depth, or `Dynamic(...)` (not for Medusa); either may be a string, such as
        "4-2-2-1" or "dynamic". The default is `Dynamic()` for EAGLE, a dynamic tree as deep as the block for DFlash,
        and a chain for all other drafters. EAGLE and DFlash also default to a chain if a chain length is given, or if
        the target is a mixture of experts or has recurrent layers.
      sample: sample the draft tokens from the drafter's distribution q, and pass q to `verify.rejection`. EAGLE then
        drafts a chain by default: 5 tokens, unless `num_draft_tokens` is given.
      dtype: dtype of the drafter's weights; default: the checkpoint's for a model, the target's for heads.
      draft_size: "fixed" or "auto". With "auto", each step drafts the full chain, half of it or nothing, whichever is
        estimated to be fastest; see `drafters.sized`. "auto" is available for n-grams, replay, and chains of models,
        EAGLE heads and MTP modules.
      any_rule: with "auto", also allow lossy rules, whose output then depends on the other rows of the batch.
      head_embed: embedding of an EAGLE or DFlash head. "own" uses the one in the head's checkpoint, if there is one;
        "target" always uses the target's.

    Raises:
      MarsError: the spec is unknown, an argument does not apply to the drafter, or the drafter does not fit the target.

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
    # The config of a user-defined model may have no `num_experts`.
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
    # {argument: (whether the caller set it, the drafter capability that it requires)}
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
    # An explicit chain length overrides the default tree, so EAGLE then drafts a chain.
    if num_draft_tokens is not None:
        length = num_draft_tokens
    elif tree is None:
        tree = usual_tree
    loaded_drafter = draft_definition.load(Asked(target, path, length, tree, sample, dtype, head_embed))
    check_finite_weights(path or kind, loaded_drafter.params)
    return sized(loaded_drafter, any_rule=any_rule) if draft_size == "auto" else loaded_drafter


def loaded(drafter: AnyDrafter, target: Pretrained) -> LoadedDrafter:
    """Convert any drafter that `generate` accepts to a `LoadedDrafter`.

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
    """Return, for each array, whether all of its entries are finite.

    One program checks all arrays, because launching a program takes longer than a check.
    """
    return [jnp.all(jnp.isfinite(weight)) for weight in weights]


def _on_host(weight: Array | np.ndarray) -> bool:
    """Return whether an array is in host memory, where it can be read without a device transfer."""
    if not isinstance(weight, Array):
        return True
    return weight.is_fully_addressable and all(device.platform == "cpu" for device in weight.devices())


def _is_finite(weight: Array | np.ndarray) -> bool:
    """Return whether all entries of an array in host memory are finite, without compiling a program."""
    host_weight = np.asarray(weight)
    if host_weight.dtype == jnp.bfloat16:
        # Infinities and NaNs have all eight exponent bits set.
        return not np.any(host_weight.view(np.uint16) & 0x7F80 == 0x7F80)
    return bool(np.all(np.isfinite(host_weight)))


def check_finite_weights(name: str, params: PyTree) -> None:
    """Raise MarsError if any weight of a drafter is infinite or NaN.

    Non-finite weights of a target would corrupt its output visibly. In a drafter they would go unnoticed, because the
    target would just reject every draft.
    """
    named_weights = [
        (path, weight)
        for path, weight in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(weight.dtype, jnp.floating)
    ]
    weights = [weight for _, weight in named_weights]
    # Avoid compiling a program if the weights are already in host memory.
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
