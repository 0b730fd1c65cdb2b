"""A rule by its name: of the table, of a checkpoint, or of the user's own file.

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
    """The rule that `spec` names, with its weights where it has some.

    Args:
      spec: a name of `specs.RULES`, with `:PATH` for a rule with weights; or FILE.py:NAME or
        package.module:NAME, where NAME takes settings as keywords and returns a rule or a `LoadedRule`. The file is
        run.
      target: from `mars_jax.load`; a head on its features must be of its size, and is put on its mesh.
      **settings: by name, as `specs` lists them; numbers are one value for all prompts or one for each. `base` is the
        name of a strict rule, or such a rule, and its settings are taken too (`block`).

    Raises:
      MarsError: an unknown name or setting, a value out of range, weights that are missing or do not fit.

    >>> load("mars", margin="gap", theta=1.5).rule.margin
    'gap'
    """
    check_type("the rule", spec, str, "its name, such as 'mars'")
    row = specs.find(spec)
    if specs.is_own(spec):
        return _own(spec, row, settings)
    takes_base = "base" in row.settings and callable(settings.get("base"))  # a rule, and not the name of one
    base = settings.pop("base") if takes_base else None
    settled = row.settle(settings)
    keywords = {name: settled[name] for name in row.settings}
    if base is not None:
        keywords["base"] = base
    elif "base" in keywords:
        rest = {name: value for name, value in settled.items() if name not in row.settings}
        keywords["base"] = load(keywords["base"], **rest).rule
    rule = specs.factory(row.factory)(**keywords)
    if "weights" not in row.needs:
        return LoadedRule(rule)
    _, path = specs.split(spec)
    if not path:
        raise MarsError(f"the rule {row.name} needs weights: name them, as {row.name}:PATH.")
    return LoadedRule(rule, specs.factory(row.reader)(path, target))


def _own(spec: str, row: specs.RuleRow, settings: dict[str, Any]) -> LoadedRule:
    factory = specs.factory(spec)
    takes = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for name, value in settings.items():
        # What no text can say, such as a base, may be given in Python.
        if name in row.settings or not (open_ended or name in takes):
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
        made = factory(**settings)
    except MarsError:
        raise
    except (Exception, SystemExit) as error:
        problem = user_code.failure(error, user_code.frames_in(user_code.MODULES, error), factory)
        raise MarsError(f"the rule is {spec}: {problem}; expected {name} to return a rule.") from error
    loaded = made if isinstance(made, LoadedRule) else LoadedRule(made)
    try:
        structure(loaded.rule)
    except MarsError:
        raise MarsError(
            f"the rule is {spec}: {user_code.definition(factory)}: {name} returned {user_code.described(made)}; "
            "expected a rule, a struct.dataclass whose fields are numbers (docs/rules.md), or a LoadedRule."
        ) from None
    return loaded


def needs_q(rule: Any) -> bool:
    """True where a rule, or the rule that it is over, verifies with the true q of a sampled draft.

    >>> needs_q(load("mars", base="rejection").rule), needs_q(load("mars").rule)
    (True, False)
    """
    return asks("q", rule)
