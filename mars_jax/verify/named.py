"""Loading of rules by name: registered rules, rules with weights in a checkpoint, and rules defined in a user's file.

Tested against rules that are constructed directly (tests/verify/test_named.py).
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
    """Load a rule by name, including its weights if it has any.

    Args:
      spec: name of a rule in `verify.rules()`, followed by `:PATH` if the rule has weights; or a user's rule, as
        FILE.py:NAME or package.module:NAME. NAME is then a function that accepts the settings as keyword arguments and
        returns a rule or a `LoadedRule`. The file is executed.
      target: target from `mars_jax.load`. If the rule has weights for the target's features, they must match the
        target's size, and they are placed on the target's mesh.
      **settings: settings of the rule, as listed by `generate --list-rules`. A number applies to all prompts; an array
        has one number per prompt. `base` is a strict rule or its name. Settings of the base, such as `block`, are also
        allowed.

    Raises:
      MarsError: a name or setting is unknown, a value is out of range, or weights are missing or do not match.

    >>> load("mars", margin="gap", theta=1.5).rule.margin
    'gap'
    """
    check_type("the rule", spec, str, "its name, such as 'mars'")
    definition = find(spec)
    if is_own(spec):
        return _load_user_rule(spec, definition, settings)
    base = None
    # `base` may be a rule object instead of a name. The constructor of the rule checks this object.
    if "base" in definition.settings and callable(settings.get("base")):
        base = settings.pop("base")
    settled = definition.settle(settings)
    keywords = {name: settled[name] for name in definition.settings}
    if base is not None:
        keywords["base"] = base
    elif "base" in keywords:
        # Settings that the rule itself does not have, such as `block`, belong to the base.
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
    """Check the settings, and call the user's function with them to build the rule."""
    factory = definition.make
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in settings.items():
        # Do not check parameters whose values cannot be written as text, such as a base rule: they are not settings.
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
    """Return True if a rule or its base needs q, the probabilities from which the draft was sampled.

    >>> needs_q(load("mars", base="rejection").rule), needs_q(load("mars").rule)
    (True, False)
    """
    return "q" in rule.needs or (rule.base is not None and "q" in rule.base.needs)
