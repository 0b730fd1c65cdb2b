"""Flags that reach outside of the library, by name: no import ties it to `contrib` or `lab`."""

from __future__ import annotations

from typing import Any

from mars_jax import specs

EXTRAS = {
    "--draft-device": "mars_jax.contrib.drafters.elsewhere:open_elsewhere",
    "--prompts-file": "mars_jax.lab.evaluate.tasks.datasets:columns",
    "--refine": "mars_jax.lab.training.online:open_refining",
    "--theta": "mars_jax.lab.theta:rule_of_file",
}
"""Functions that flags call: "module:function"."""


def call(flag: str, *arguments: Any, **options: Any) -> Any:
    """Call the function of a flag."""
    return specs.factory(EXTRAS[flag])(*arguments, **options)
