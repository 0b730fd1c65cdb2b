"""The per-request settings by name: what a flag or a row of a prompts file may say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mars_jax.core.errors import MarsError

_MOST = 2**31 - 1  # settings travel as int32 and float32
_LARGEST = 3e38


class Setting(NamedTuple):
    """One setting: its type, its range, and both in words."""

    kind: type
    ok: Callable[[Any], bool]
    expected: str


# A comparison with NaN is False, so every range refuses it.
SETTINGS = {
    "temperature": Setting(
        float, lambda v: 0 <= v <= _LARGEST, "a finite number of at least 0 (0 is greedy)"
    ),
    "top_k": Setting(int, lambda v: 0 <= v <= _MOST, "a whole number of at least 0 (0 is off)"),
    "top_p": Setting(float, lambda v: 0 < v <= 1, "a number above 0 and at most 1 (1 is off)"),
    "min_p": Setting(float, lambda v: 0 <= v <= 1, "a number between 0 and 1 (0 is off)"),
    "theta": Setting(float, lambda v: v > 0, "a number above 0 (inf is strict)"),
    "tau": Setting(
        float, lambda v: 1 <= v <= 1024, "a number of at least 1, the token that every step gives"
    ),
    "max_relaxed_run": Setting(int, lambda v: 0 <= v <= _MOST, "a whole number of at least 0"),
    "seed": Setting(int, lambda v: 0 <= v < 2**32, "a whole number from 0 to 4294967295"),
    "max_new_tokens": Setting(int, lambda v: 1 <= v <= _MOST, "a whole number of at least 1"),
    "strict": Setting(bool, lambda v: True, "true or false"),
    "draft_stop": Setting(float, lambda v: v >= 0, "a number of at least 0 (inf is off)"),
    "batch_size": Setting(int, lambda v: 1 <= v <= 2**16, "a whole number from 1 to 65536"),
    # Every drafted token is a node of the one target forward, which past this is no longer cheap.
    "num_draft_tokens": Setting(int, lambda v: 1 <= v <= 128, "a whole number from 1 to 128"),
}
PER_REQUEST = tuple(name for name in SETTINGS if name not in ("batch_size", "num_draft_tokens", "tau"))
"""Settings that a row of a prompts file may carry."""
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Settings that only sampling reads, and the value that is off."""
MESH_HELP = (
    "divide the work over devices: data (rows of the batch), model (heads, hidden units and vocabulary) and expert, as "
    "in data=2,model=4 (default: one device)"
)
NO_CHECK_HELP = (
    "do not compare the checksums of a --target that mars_jax.convert wrote with what is read of it"
)
MOST_NODES = 1024
"""Nodes of the largest tree, for the same reason."""


class DynamicTree(NamedTuple):
    """What `drafters.Dynamic` is made of, whose module imports jax. The defaults are its own."""

    top_k: int = 10
    depth: int = 7
    nodes: int = 60


def from_text(name: str, text: str) -> Any:
    """The value of a flag.

    Raises:
      MarsError: not a number, or out of range.

    >>> from_text("theta", "inf")
    inf
    """
    setting = SETTINGS[name]
    try:
        value = setting.kind(text)
    except ValueError:
        value = None
    if value is None or not setting.ok(value):
        raise MarsError(f"--{name.replace('_', '-')} is {text}: expected {setting.expected}.")
    return value


def from_json(name: str, value: Any) -> Any:
    """The value of a key in a row.

    Raises:
      MarsError: of another type, or out of range.

    >>> from_json("temperature", 1)
    1.0
    """
    setting = SETTINGS[name]
    # JSON writes 1.0 as 1; but true is no number, though Python's bool is an int.
    if setting.kind is float and type(value) is int and abs(value) <= _LARGEST:
        value = float(value)
    if type(value) is not setting.kind or not setting.ok(value):
        raise MarsError(f"{name} is {value!r}: expected {setting.expected}.")
    return value


def tree_from_text(text: str) -> tuple[int, ...] | DynamicTree:
    """Children per node at each depth, or the sizes of a dynamic tree.

    Raises:
      MarsError: not whole numbers of at least 1 joined by "-", or too many nodes.

    >>> tree_from_text("4-2-2-1"), tree_from_text("dynamic:8-6-40")
    ((4, 2, 2, 1), DynamicTree(top_k=8, depth=6, nodes=40))
    """
    if text == "dynamic":
        return DynamicTree()
    dynamic = text.startswith("dynamic:")
    parts = text.removeprefix("dynamic:").split("-")
    whole = all(part.isascii() and part.isdigit() and len(part) < 5 and int(part) for part in parts)
    if not whole or (dynamic and len(parts) != 3):
        raise MarsError(
            f"--tree is {text}: expected the children per node at each depth, such as 4-2-2-1, or dynamic, or its "
            "children, depth and nodes, such as dynamic:8-6-40."
        )
    sizes = tuple(int(part) for part in parts)
    if dynamic:
        tree = DynamicTree(*sizes)
        if tree.nodes < 2:
            raise MarsError(f"--tree is {text}: expected at least 2 nodes, the first being the root.")
        # What is drafted, not only what is kept of it, is work.
        _check_nodes(text, max(tree.nodes, tree.top_k * tree.depth))
        return tree
    nodes, level = 1, 1
    for width in sizes:
        level *= width
        nodes += level
        _check_nodes(text, nodes)
    return sizes


def _check_nodes(text: str, nodes: int) -> None:
    if nodes > MOST_NODES:
        raise MarsError(f"--tree is {text}, more than {MOST_NODES} nodes: choose a smaller tree.")
