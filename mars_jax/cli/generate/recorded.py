"""What decides the rows of a run, as plain values: the settings that an --output is recorded with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from mars_jax import specs
from mars_jax.cli.generate.applies import Choices
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.rule_flags import FLAGS
from mars_jax.serve.journal import plain

_ELSEWHERE = {
    "prompts", "prompts_file",  # rows are compared with their prompts one by one
    "output", "resume", "json", "stream", "speedup", "compare",
    # A row alone is the row in a batch, on one device or on many.
    "batch_size", "prefill_chunk", "mesh", "draft_device", "coordinator", "num_processes", "process_id",
    "no_check",  # whether checksums are compared, not what is loaded
    "theta_file", "rule", "rule_option", *FLAGS,  # what they choose is recorded as the rule's settings
}  # fmt: skip
"""Flags that decide no row. Every other one is recorded, also one that does not exist yet."""
_DEFAULTS = {name: row.default for name, row in specs.REQUEST.items() if row.default is not None}


class Recorded(NamedTuple):
    """The settings of a run: JSON values that differ from the defaults."""

    settings: dict[str, Any]
    own: dict[str, dict[str, Any]]  # by the number of the prompt, where it chooses for itself
    weights: dict[str, str] | None = None  # a fingerprint of each, known when they are loaded


def recorded(args: argparse.Namespace, choices: Choices, rows: Sequence[PromptRow]) -> Recorded:
    """The settings of the flags and of the prompts file.

    A flag that is given with its default is one that is not given: both decode the same.
    """
    settings = {
        name: plain(value)
        for name, value in vars(args).items()
        if name not in _ELSEWHERE and not _is_default(name, value)
    }
    rule = choices.rule
    settings["verify"] = rule.spec
    for name, value in rule.settings.items():
        if value != rule.options[name].default:
            settings[name] = plain(value)
    own = {str(i): plain(row.settings | row.numbers) for i, row in enumerate(rows)}
    own = {number: chosen for number, chosen in own.items() if chosen}
    return Recorded(settings, own)


def _is_default(name: str, value: Any) -> bool:
    # By identity, since 0 equals False and is a setting.
    return value is None or value is False or (name in _DEFAULTS and value == _DEFAULTS[name])
