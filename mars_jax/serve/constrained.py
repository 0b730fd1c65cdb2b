"""Options that constrain a text, one for all prompts or one for each. Oracle: tests/serve/test_constraints.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mars_jax import constraints
from mars_jax.constraints import Constraint
from mars_jax.core.errors import MarsError, check_switch, short_repr

_FACTORIES = {
    "regex": constraints.regex,
    "json_schema": constraints.json_schema,
    "choice": constraints.choice,
    "allowed_tokens": constraints.tokens,
}
FIELDS = tuple(_FACTORIES)
"""Options of `generate` that each make a constraint; `constraint` takes one that is made already."""


def with_constraints(options: dict[str, Any], count: int) -> dict[str, Any]:
    """Return options of `count` prompts whose `constraint` is one for each, in place of those that make one.

    Raises:
      MarsError: two that contradict each other, or as the factories.
    """
    left = {name: value for name, value in options.items() if name not in (*FIELDS, "relax_constrained")}
    own: list[Constraint | None] = [None] * count
    for name in ("constraint", *FIELDS):
        value = options.get(name)
        if value is None:
            continue
        values = list(value) if _is_many(name, value) else [value] * count
        if len(values) != count:
            raise MarsError(
                f"{name} has {len(values)} values for {count} prompts: give one, or one per prompt."
            )
        made: dict[int, Constraint] = {}  # one value is read once
        for i, one in enumerate(values):
            if one is None:
                continue
            if own[i] is not None:
                raise MarsError(
                    f"{name} is given beside another constraint: a text follows one, so leave one out."
                )
            if id(one) not in made:
                made[id(one)] = one if name == "constraint" else _FACTORIES[name](one)
                if not isinstance(made[id(one)], Constraint):
                    raise MarsError(
                        f"constraint is {short_repr(one)}: expected one of mars_jax.constraints, such as regex(...)."
                    )
            own[i] = made[id(one)]
    relax = options.get("relax_constrained", False)
    switches = list(relax) if isinstance(relax, list | tuple) else [relax] * count
    if len(switches) != count:
        raise MarsError(
            f"relax_constrained has {len(switches)} values for {count} prompts: give one, or one per prompt."
        )
    for switch in switches:
        check_switch("relax_constrained", switch)
    if any(switches) and not any(own):
        raise MarsError("relax_constrained does not apply where no text is constrained: leave it out.")
    own = [one.relaxed() if one and switch else one for one, switch in zip(own, switches, strict=True)]
    return left | {"constraint": own} if any(own) else {k: v for k, v in left.items() if k != "constraint"}


def _is_many(name: str, value: Any) -> bool:
    """Tell whether a value is one for each prompt."""
    if isinstance(value, str | Mapping) or not isinstance(value, list | tuple):
        return False
    if name in ("choice", "allowed_tokens"):  # one of them is a list already
        return any(one is None or isinstance(one, list | tuple) for one in value)
    return True
