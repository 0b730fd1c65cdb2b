"""Loading of rules by name: from the table, from a checkpoint, or from a user's file.

Oracle: the factories themselves, in tests/verify/test_named.py.
"""

from __future__ import annotations

import inspect
from typing import Any

from mars_jax import specs
from mars_jax.core import user_code
from mars_jax.core.errors import MarsError, check_type
from mars_jax.core.rule import LoadedRule, asks, structure


def load(spec: str, target: Any = None, **settings: Any) -> LoadedRule:
    """Load the rule named by `spec`, with its weights if any.

    Args:
      spec: a name in `specs.RULES`, followed by `:PATH` for a rule with weights; or FILE.py:NAME or
        package.module:NAME, where NAME takes settings as keywords and returns a rule or a `LoadedRule`. The file is
        executed.
      target: from `mars_jax.load`; a head on its features must match its size, and is placed on its mesh.
      **settings: by name, as listed in `specs`; numbers are one value for all prompts or one per prompt. `base` is a
        strict rule or its name; settings of the base, such as `block`, are accepted too.

    Raises:
      MarsError: a name or setting is unknown, a value is out of range, or weights are missing or do not fit.

    >>> load("mars", margin="gap", theta=1.5).rule.margin
    'gap'
    """
    check_type("the rule", spec, str, "its name, such as 'mars'")
    row = specs.find(spec)
    if specs.is_own(spec):
        return _load_user_rule(spec, row, settings)
    takes_base = "base" in row.settings and callable(settings.get("base"))  # a rule rather than its name
    base = settings.pop("base") if takes_base else None
    settled = row.settle(settings)
    keywords = {name: settled[name] for name in row.settings}
    if base is not None:
        keywords["base"] = base
    elif "base" in keywords:
        base_settings = {name: value for name, value in settled.items() if name not in row.settings}
        keywords["base"] = load(keywords["base"], **base_settings).rule
    rule = specs.factory(row.factory)(**keywords)
    if "weights" not in row.needs:
        return LoadedRule(rule)
    _, path = specs.split(spec)
    if not path:
        raise MarsError(f"the rule {row.name} needs weights: name them, as {row.name}:PATH.")
    return LoadedRule(rule, specs.factory(row.reader)(path, target))


def _load_user_rule(spec: str, row: specs.RuleRow, settings: dict[str, Any]) -> LoadedRule:
    """Call a user's factory with checked settings."""
    factory = specs.factory(spec)
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in settings.items():
        # Parameters without a textual form, such as a base, are not listed in the row; pass them through unchecked.
        if name in row.settings or not (open_ended or name in parameters):
            row.check(name, value)
    missing = [
        n for n, s in row.settings.items() if s.default is None and not s.optional and n not in settings
    ]
    if missing:
        raise MarsError(
            f"the rule {row.name} needs a {missing[0]}: give {row.settings[missing[0]].expected()}."
        )
    name = spec.rpartition(":")[2]
    try:
        result = factory(**settings)
    except MarsError:
        raise
    except (Exception, SystemExit) as error:
        problem = user_code.failure(error, user_code.frames_in(user_code.MODULES, error), factory)
        raise MarsError(f"the rule is {spec}: {problem}; expected {name} to return a rule.") from error
    loaded = result if isinstance(result, LoadedRule) else LoadedRule(result)
    try:
        structure(loaded.rule)
    except MarsError:
        raise MarsError(
            f"the rule is {spec}: {user_code.definition(factory)}: {name} returned {user_code.described(result)}; "
            "expected a rule, a struct.dataclass whose fields are numbers (docs/rules.md), or a LoadedRule."
        ) from None
    return loaded


def needs_q(rule: Any) -> bool:
    """Return whether a rule, or one of its bases, verifies with the true q of a sampled draft.

    >>> needs_q(load("mars", base="rejection").rule), needs_q(load("mars").rule)
    (True, False)
    """
    return asks("q", rule)
