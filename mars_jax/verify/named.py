"""Loading of rules by name: from the table, from a checkpoint, or from a user's file.

Oracle: the classes themselves, in tests/verify/test_named.py.
"""

from __future__ import annotations

import inspect
from typing import Any

from mars_jax.core.rule import LoadedRule, Rule, structure
from mars_jax.utils import user_code
from mars_jax.utils.errors import MarsError, check_type
from mars_jax.utils.user_code import load_function
from mars_jax.verify.definition import Definition
from mars_jax.verify.own import find, is_own, split


def load(spec: str, target: Any = None, **settings: Any) -> LoadedRule:
    """Load the rule named by `spec`, with its weights if any.

    Args:
      spec: a name of `verify.rules()`, followed by `:PATH` for a rule with weights; or FILE.py:NAME or
        package.module:NAME, where NAME takes settings as keywords and returns a rule or a `LoadedRule`. The file is
        executed.
      target: from `mars_jax.load`; a head on its features must match its size, and is placed on its mesh.
      **settings: by name, as `generate --list-rules` lists them; numbers are one value for all prompts or one per
        prompt. `base` is a strict rule or its name; settings of the base, such as `block`, are accepted too.

    Raises:
      MarsError: a name or setting is unknown, a value is out of range, or weights are missing or do not fit.

    >>> load("mars", margin="gap", theta=1.5).rule.margin
    'gap'
    """
    check_type("the rule", spec, str, "its name, such as 'mars'")
    definition = find(spec)
    if is_own(spec):
        return _load_user_rule(spec, definition, settings)
    base = None
    # A base may be a rule instead of its name. The rule's class checks it.
    if "base" in definition.settings and callable(settings.get("base")):
        base = settings.pop("base")
    settled = definition.settle(settings)
    keywords = {name: settled[name] for name in definition.settings}
    if base is not None:
        keywords["base"] = base
    elif "base" in keywords:
        # Settings that the rule itself does not have, such as `block`, are those of the base.
        base_settings = {name: value for name, value in settled.items() if name not in definition.settings}
        keywords["base"] = load(keywords["base"], **base_settings).rule
    rule = definition.make(**keywords)
    if "weights" not in definition.needs:
        return LoadedRule(rule)
    _, path = split(spec)
    if not path:
        raise MarsError(f"the rule {definition.name} needs weights: name them, as {definition.name}:PATH.")
    return LoadedRule(rule, load_function(f"{definition.make.__module__}:read")(path, target))


def _load_user_rule(spec: str, definition: Definition, settings: dict[str, Any]) -> LoadedRule:
    """Call a user's factory with checked settings."""
    factory = definition.make
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in settings.items():
        # Parameters without a textual form, such as a base, are not settings of the definition and pass unchecked.
        if name in definition.settings or not (open_ended or name in parameters):
            definition.setting(name).check(value)
    for name, setting in definition.settings.items():
        if setting.default is None and not setting.optional and name not in settings:
            raise MarsError(f"the rule {definition.name} needs a {name}: give {setting.expected()}.")
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
            f"the rule is {spec}: {user_code.location_of(factory)}: {name} returned {user_code.described(result)}; "
            "expected a rule, a struct.dataclass that derives from verify.Rule (docs/rules.md), or a LoadedRule."
        ) from None
    return loaded


def needs_q(rule: Rule) -> bool:
    """Return whether a rule, or its base, verifies with the true q of a sampled draft.

    >>> needs_q(load("mars", base="rejection").rule), needs_q(load("mars").rule)
    (True, False)
    """
    return "q" in rule.needs or (rule.base is not None and "q" in rule.base.needs)
