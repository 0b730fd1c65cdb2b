"""The rotary embedding of a config.json <-> Rope. Oracle: `ROPE_INIT_FUNCTIONS` of transformers 5."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.hub.values import count
from mars_jax.models.config import Rope


def yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """Return YaRN's factor on cos and sin (arXiv 2309.00071, equation 15), as transformers resolves it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def read_rope(data: dict[str, Any], *, base: str = "rope_theta", theta: float = 10000.0) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

    A setting may be repeated, as in `type` next to `rope_type`, if the values are equal.

    Args:
      data: contents of config.json.
      base: key of the frequencies' base outside of `rope_scaling` and `rope_parameters`.
      theta: base if config.json has none.

    Raises:
      MarsError: a type that is not supported or lacks a number, or settings that contradict each other.

    >>> read_rope({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}).factor
    2.0
    """
    keys = [key for key in ("rope_scaling", "rope_parameters") if data.get(key)] or ["rope_scaling"]
    rope, *others = [_read(data, key, base, theta) for key in keys]
    for other in others:
        if rope != other:
            names = ("kind", *(field.name for field in dataclasses.fields(Rope)))
            name = next(name for name in names if getattr(rope, name) != getattr(other, name))
            raise MarsError(
                f"rope_scaling and rope_parameters differ in rope {name} ({getattr(rope, name)!r} and "
                f"{getattr(other, name)!r}, defaults included): keep the one that the model was trained with."
            )
    return rope


def check_same_rope(outer: dict[str, Any], inner: dict[str, Any], place: str) -> None:
    """Raise MarsError if config.json repeats RoPE settings of its nested config `place` with other values."""
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"):
        _agreed({key: outer.get(key), f"{place}.{key}": inner.get(key)}, None)


def _agreed(values: dict[str, Any], default: Any) -> Any:
    """Return the value of a setting that several keys may have; `default` if none has it.

    Raises:
      MarsError: two keys have different values.
    """
    present = {key: value for key, value in values.items() if value is not None}
    for (key, value), (other, different) in itertools.pairwise(present.items()):
        if value != different:
            raise MarsError(
                f"{key} is {value!r} and {other} is {different!r}: keep the one that the model was trained with."
            )
    return next(iter(present.values()), default)


def _read(data: dict[str, Any], place: str, base: str, default_theta: float) -> Rope:
    """Read the settings in `data[place]`, and those that older configs have outside of it."""
    scaling = data.get(place) or {}
    if not isinstance(scaling, dict):
        raise MarsError(
            f'{place} is {scaling!r}: expected an object, such as {{"rope_type": "linear", "factor": 2.0}}.'
        )
    if nested := [key for key in scaling if key.endswith("_attention")]:
        raise MarsError(
            f"{place} has settings for each layer type ({nested[0]}), and this model has one rope."
        )

    def setting(key: str, default: Any, outside: str | None = None) -> Any:
        outside = outside or key
        return _agreed({f"{place}.{key}": scaling.get(key), outside: data.get(outside)}, default)

    types = {f"{place}.{key}": scaling.get(key) for key in ("rope_type", "type")}
    kind = _agreed(types, "default")
    theta = float(setting("rope_theta", default_theta, base))
    if setting("partial_rotary_factor", 1.0) != 1.0:
        raise MarsError("partial_rotary_factor is not supported: only heads that are rotated whole are.")
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise MarsError(
            f"rope type '{kind}' is not supported: the supported ones are default, linear, llama3, yarn."
        )
    longest = count(data, "max_position_embeddings", 2048)
    trained = "original_max_position_embeddings"
    trained = count({trained: setting(trained, longest)}, trained, longest)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = longest / trained
    if factor is None:
        raise MarsError(
            f"rope type '{kind}' needs a factor, and config.json gives none: add it to rope_scaling."
        )
    fields: dict[str, Any] = {"theta": theta, "kind": kind, "factor": float(factor)}
    if kind == "linear":
        return Rope(**fields)
    fields["original_max_positions"] = trained
    if kind == "llama3":
        missing = [key for key in ("low_freq_factor", "high_freq_factor") if scaling.get(key) is None]
        if missing:
            raise MarsError(f"rope type 'llama3' needs {missing[0]}, and config.json gives none: add it.")
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return Rope(**fields, low_freq_factor=low, high_freq_factor=high)
    return Rope(
        **fields,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        attention_factor=yarn_attention_factor(scaling, float(factor)),
        truncate=bool(scaling.get("truncate", True)),
    )


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return the `rope_scaling` of config.json, as transformers 4 and 5 read it; None where nothing is stretched."""
    if rope.kind == "none":
        return None
    data: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return data
    data["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        return data | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    data |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    return data | {"attention_factor": rope.attention_factor}
