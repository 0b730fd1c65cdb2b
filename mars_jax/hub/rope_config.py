"""Conversion between the rope settings of a config.json and Rope.

Tested against `ROPE_INIT_FUNCTIONS` of transformers 5.
"""

from __future__ import annotations

import functools
import math

from mars_jax.hub.values import count, value_or_default
from mars_jax.models.config import ROPE_KINDS, Rope
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject


def yarn_attention_factor(scaling: JsonObject, factor: float) -> float:
    """Return YaRN's factor for cos and sin (arXiv 2309.00071, equation 15), computed as in transformers."""

    def mscale(weight: float) -> float:
        # A factor of at most 1 does not stretch the context, so its logarithm is taken as 0.
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


_REQUIRED = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
"""Settings without a default, by rope type."""
_OUTSIDE = ("partial_rotary_factor", "original_max_position_embeddings")
"""Settings that older configs store at the top level of config.json."""


def read_rope(
    data: JsonObject, *, base: str = "rope_theta", theta: float = 10000.0, fraction: float | None = None
) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

    Args:
      data: contents of config.json.
      base: top-level key that stores theta, the base of the frequencies.
      theta: default if config.json has no theta.
      fraction: default of partial_rotary_factor; None if the architecture always rotates whole heads.

    Raises:
      MarsError: the rope type is not supported, a required setting is missing, or settings contradict each other.

    >>> read_rope({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}).factor
    2.0
    """
    scaling = _settings(data, base)
    kind = scaling.get("rope_type", "default")
    theta = float(scaling.get("rope_theta", theta))
    # Phi-3 first called its scaling "su", and later "yarn".
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):
        kind = "longrope"
    rotated_fraction = float(scaling.get("partial_rotary_factor", fraction or 1.0))
    if fraction is None and rotated_fraction != 1:
        raise MarsError(
            f"partial_rotary_factor is {rotated_fraction:g}: this architecture needs 1, whole heads."
        )
    common = functools.partial(Rope, theta=theta, fraction=rotated_fraction)
    if kind == "default":
        return common()
    if kind not in ROPE_KINDS[1:]:
        raise MarsError(
            f"rope type '{kind}' is not supported: expected default, {', '.join(ROPE_KINDS[1:])}."
        )
    longest = count(data, "max_position_embeddings", 2048)
    trained = count(scaling, "original_max_position_embeddings", longest)
    factor = scaling.get("factor")
    missing = [key for key in _REQUIRED.get(kind, ()) if scaling.get(key) is None]
    if missing:
        raise MarsError(f"rope type '{kind}' needs {missing[0]}: add it to rope_scaling.")
    if kind == "longrope":
        ratio = max(factor or longest / trained, 1.0)
        # LongRoPE (arXiv 2402.13753), with the attention factor of Phi-3's code.
        attention_factor = math.sqrt(1 + math.log(ratio) / math.log(trained))
        return common(
            kind=kind,
            original_max_positions=trained,
            short_divisors=tuple(map(float, scaling["short_factor"])),
            long_divisors=tuple(map(float, scaling["long_factor"])),
            is_long=longest > trained,
            attention_factor=float(value_or_default(scaling, "attention_factor", attention_factor)),
        )
    # As in transformers, YaRN's factor defaults to the ratio of the context length to the original one.
    if factor is None and kind == "yarn":
        factor = longest / trained
    if factor is None:
        raise MarsError(f"rope type '{kind}' needs a factor: add it to rope_scaling.")
    scaled = functools.partial(common, kind=kind, factor=float(factor))
    if kind in ("linear", "dynamic"):
        return scaled()
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return scaled(original_max_positions=trained, low_freq_factor=low, high_freq_factor=high)
    return scaled(
        original_max_positions=trained,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        attention_factor=yarn_attention_factor(scaling, float(factor)),
        truncate=bool(scaling.get("truncate", True)),
        query_growth=float(scaling.get("llama_4_scaling_beta") or 0),
    )


def _settings(data: JsonObject, base: str) -> JsonObject:
    """Merge the rope settings of config.json, which may list a setting in several places.

    Raises:
      MarsError: two places set different values for the same setting.
    """
    top_level = {"rope_theta": data.get(base)} | {key: data.get(key) for key in _OUTSIDE}
    settings: JsonObject = {}
    for place, values in (
        ("config.json", top_level),
        ("rope_scaling", data.get("rope_scaling") or {}),
        ("rope_parameters", data.get("rope_parameters") or {}),
    ):
        if not isinstance(values, dict):
            raise MarsError(f'{place} is {values!r}: expected an object, such as {{"rope_type": "default"}}.')
        if nested := [key for key in values if key.endswith("_attention")]:
            raise MarsError(f"{place} has settings for each layer type ({nested[0]}): expected one rope.")
        for key, value in values.items():
            if value is None:
                continue
            # Old files use the key `type` instead of `rope_type`.
            earlier = settings.setdefault("rope_type" if key == "type" else key, value)
            if value is not earlier and value != earlier:
                raise MarsError(
                    f"{place} sets {key} to {value!r}, and another setting is {earlier!r}: keep the one that the model "
                    "was trained with."
                )
    return settings


def write_scaling(rope: Rope) -> JsonObject | None:
    """Return the value of `rope_scaling` in config.json, for transformers 4 and 5; None if the rope is not scaled."""
    if rope.kind == "none":
        return None
    if rope.kind == "longrope":
        # Write only these keys, because transformers 4 accepts no others. `hub.save` refuses a rope whose attention
        # factor differs from the one that `read_rope` computes.
        divisors = {"short_factor": list(rope.short_divisors), "long_factor": list(rope.long_divisors)}
        return {"type": "longrope", **divisors}
    data: JsonObject = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("linear", "dynamic"):
        return data
    data["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        return data | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    data |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.query_growth:
        data["llama_4_scaling_beta"] = rope.query_growth
    return data | {"attention_factor": rope.attention_factor}
