"""Verification rules and drafters from single papers, without a guarantee of stability.

They implement the same interfaces as the rest of the library. Each rule can be created by its name: `contrib.fly(...)`
is short for `contrib.rules.fly.Fly(...)`.
"""

from __future__ import annotations

from typing import Any

from mars_jax.utils.user_code import load_function

# {public name: "module:name"}; each object is imported on first use. So are the rules, which are not listed here.
_HOME = {
    name: f"mars_jax.contrib.{module}:{name}"
    for module, names in {
        "drafters.ahead": ("ahead", "run_ahead"),
        "drafters.cascade": ("CascadeParams", "cascade"),
        "drafters.dflash": ("dflash",),
        "drafters.dflash_files": ("load_dflash", "save_dflash"),
        "drafters.elsewhere": ("draft_elsewhere",),
        "drafters.medusa": ("medusa",),
        "drafters.medusa_files": ("load_medusa", "save_medusa"),
        "drafters.replay": ("corpus", "replay"),
        "drafters.self_draft": ("self_draft",),
        "drafters.sprinter": ("SprinterParams", "sprinter"),
        "rules.context": ("by_context", "context", "token_classes"),
        "rules.equivalent": ("token_groups",),
        "rules.head_files": ("save",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    rules = _rules()
    if name in rules:
        attribute = rules[name].make
    elif name in _HOME:
        attribute = load_function(_HOME[name])
    else:
        raise AttributeError(f"module 'mars_jax.contrib' has no attribute '{name}'")
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted([*_HOME, *_rules()])


def _rules() -> dict[str, Any]:
    from mars_jax.verify import rules

    return {n: rule for n, rule in rules().items() if rule.make.__module__.startswith("mars_jax.contrib.")}
