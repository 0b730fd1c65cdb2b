"""Readers and writers of systems that accept some draft tokens without verification: SPRINTER, TriSpec and VIA-SD.

A directory contains config.json, whose `model_type` names the system and whose `draft` names the small model: a
subdirectory, a model included in the package, or a name on the hub. SPRINTER's classifier is in model.safetensors.
Tested with round trips and invalid variants of the files, in tests/contrib/test_system_files.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mars_jax.hub.config_json import read_json
from mars_jax.hub.files import Tensor, _is_within, resolve, tensors
from mars_jax.hub.save import free_directory, write_directory
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

NUMBERS: Mapping[str, Mapping[str, float]] = {
    "sprinter": {"threshold": 0.5},
    "trispec": {"margin": 0.5},
    "via_sd": {"accept": 0.6, "escalate": 0.3},
}
"""Default thresholds of each system. With thresholds above 1, a system trusts no tokens."""
NGRAM = "ngram"
"""Value of `draft` that selects n-grams instead of a small model; only for systems with a proxy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """The contents of a system's config.json."""

    name: str  # name of the drafter
    draft: str  # name of the small model, or `NGRAM`
    draft_tokens: int = 5  # chain length of the inner drafter; only for systems with a proxy
    proxy: str = ""  # TriSpec: name of the proxy
    # VIA-SD: for each layer, whether the slim verifier keeps its (attention, MLP).
    layers: tuple[tuple[bool, bool], ...] = ()
    # Thresholds, in the order of `NUMBERS`.
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    directory: Path = Path()


def load_system(name_or_path: str | os.PathLike[str], kind: str) -> System:
    """Read the config.json of a system from a directory or from the hub.

    Raises:
      MarsError: the directory does not exist, contains a different system, or its config has invalid values.

    >>> load_system("tiny/trispec", "trispec").draft
    'tiny/draft'
    """
    directory = resolve(name_or_path)
    config_path = directory / "config.json"
    data = read_json(config_path)

    def refuse(key: str, expected: str) -> MarsError:
        return MarsError(f"{key} of '{config_path}' is {data.get(key)!r}: expected {expected}.")

    if data.get("model_type") != kind:
        raise refuse("model_type", f"{kind}, or draft with the system that it names")
    for key in {"trispec": ("draft", "proxy")}.get(kind, ("draft",)):
        if not isinstance(data.get(key), str) or not data[key]:
            raise refuse(key, "the name of a checkpoint")
    tokens = data.get("draft_tokens", 5)
    if type(tokens) is not int or not 1 <= tokens <= 64:
        raise refuse("draft_tokens", "a whole number from 1 to 64")
    layers = data.get("layers", [])
    is_mask = isinstance(layers, list) and all(
        isinstance(pair, list) and [type(keep) for keep in pair] == [bool, bool] for pair in layers
    )
    if kind == "via_sd" and not (layers and is_mask):
        raise refuse("layers", "[attention, mlp] of every layer, each true or false")
    numbers = {}
    for key, default in NUMBERS[kind].items():
        threshold = data.get(key, default)
        if type(threshold) not in (int, float) or not math.isfinite(threshold):
            raise refuse(key, "a number")
        numbers[key] = float(threshold)
    system = System(name=kind, draft=data["draft"], draft_tokens=tokens, numbers=numbers, directory=directory)
    if kind == "trispec":
        return dataclasses.replace(system, proxy=data["proxy"])
    if kind == "via_sd":
        return dataclasses.replace(system, layers=tuple((a, m) for a, m in layers))
    return system


def resolve_system_model(system: System, name: str) -> str:
    """Resolve a model name in a system's config to the path of a subdirectory, or else return the name itself."""
    if _is_within(name) and (system.directory / name / "config.json").is_file():
        return str(system.directory / name)
    if Path(name).is_absolute() or name.startswith((".", "~")):
        raise MarsError(
            f"'{system.directory / 'config.json'}' names the model {name!r}: expected a directory within its own, or "
            "owner/name."
        )
    return name


def load_classifier(system: System) -> tuple[np.ndarray, np.ndarray]:
    """Load the weights of SPRINTER's classifier, as (weight f32[E], bias f32[]).

    Raises:
      MarsError: the weights are missing or do not have the shapes of a classifier.
    """
    stored_tensors: dict[str, Tensor] = {}
    for part in tensors(system.directory):
        stored_tensors |= part
    shapes = {name: t.shape for name, t in stored_tensors.items()}
    if shapes.keys() != {"weight", "bias"} or len(shapes["weight"]) != 1 or shapes["bias"] != (1,):
        raise MarsError(
            f"the weights in '{system.directory}' are {shapes}: expected weight [E] and bias [1] of a classifier."
        )
    weight, bias = (stored_tensors[name].read().astype(np.float32) for name in ("weight", "bias"))
    return weight, bias[0]


def save_system(
    path: str | os.PathLike[str], system: System, arrays: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Write a system's directory and return its path.

    Args:
      path: path of the new directory.
      system: the contents of config.json.
      arrays: SPRINTER's `weight` f32[E] and `bias` f32[1].

    Raises:
      MarsError: the directory is not empty.

    >>> save_system("mine", System(name="trispec", draft="tiny/draft", proxy="tiny/proxy"))  # doctest: +SKIP
    PosixPath('mine')
    """
    data: JsonObject = {"model_type": system.name, "draft": system.draft}
    if system.name != "sprinter":
        data["draft_tokens"] = system.draft_tokens
    if system.name == "trispec":
        data["proxy"] = system.proxy
    if system.name == "via_sd":
        data["layers"] = [list(keeps) for keeps in system.layers]
    data |= {**NUMBERS[system.name], **system.numbers}
    return write_directory(free_directory(path, overwrite=False), dict(arrays or {}), data)
