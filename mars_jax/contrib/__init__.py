"""Rules and drafters of one paper each, through the same seams and tables as the library's. All may change."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mars_jax.contrib.drafters.cascade import CascadeParams, cascade
    from mars_jax.contrib.drafters.elsewhere import draft_elsewhere
    from mars_jax.contrib.drafters.sprinter import SprinterParams, sprinter
    from mars_jax.contrib.rules.budget import Budget, budget
    from mars_jax.contrib.rules.cactus import Cactus, cactus
    from mars_jax.contrib.rules.context import ByContext, Context, by_context, context, token_classes
    from mars_jax.contrib.rules.diversed import Diversed, diversed
    from mars_jax.contrib.rules.entropy_gate import EntropyGate, entropy_gate
    from mars_jax.contrib.rules.equivalent import Equivalent, equivalent, token_groups
    from mars_jax.contrib.rules.fly import Fly, fly
    from mars_jax.contrib.rules.head_files import save
    from mars_jax.contrib.rules.learned import Learned, learned
    from mars_jax.contrib.rules.lenience import Lenience, lenience
    from mars_jax.contrib.rules.phrase import Phrase, phrase
    from mars_jax.contrib.rules.released import Released, released
    from mars_jax.contrib.rules.speccascade import SpecCascade, speccascade

# Names and the module of each. They load on first use.
_HOME = {
    "draft_elsewhere": "drafters.elsewhere",
    "ByContext": "rules.context",
    "by_context": "rules.context",
    "save": "rules.head_files",
    "Budget": "rules.budget",
    "Cactus": "rules.cactus",
    "CascadeParams": "drafters.cascade",
    "Context": "rules.context",
    "Diversed": "rules.diversed",
    "EntropyGate": "rules.entropy_gate",
    "Equivalent": "rules.equivalent",
    "Fly": "rules.fly",
    "Learned": "rules.learned",
    "Lenience": "rules.lenience",
    "Phrase": "rules.phrase",
    "Released": "rules.released",
    "SpecCascade": "rules.speccascade",
    "SprinterParams": "drafters.sprinter",
    "budget": "rules.budget",
    "cactus": "rules.cactus",
    "cascade": "drafters.cascade",
    "context": "rules.context",
    "diversed": "rules.diversed",
    "entropy_gate": "rules.entropy_gate",
    "equivalent": "rules.equivalent",
    "fly": "rules.fly",
    "learned": "rules.learned",
    "lenience": "rules.lenience",
    "phrase": "rules.phrase",
    "released": "rules.released",
    "speccascade": "rules.speccascade",
    "sprinter": "drafters.sprinter",
    "token_classes": "rules.context",
    "token_groups": "rules.equivalent",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'mars_jax.contrib' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"mars_jax.contrib.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
