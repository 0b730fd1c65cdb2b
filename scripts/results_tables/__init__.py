"""The figures of the pages of results, read from the JSON under scripts/results."""

from __future__ import annotations

from typing import Any

from results_tables.checks import checks, kills, same_cost
from results_tables.evidence import assisted, evidence
from results_tables.fair import fair
from results_tables.mutants import mutants
from results_tables.pair import blocks, drafters, family, on_cpu, shapes
from results_tables.phrases import phrases
from results_tables.rules import compared
from results_tables.scale import bits, gpu, kernels, one_chip, plans, published, refill, shift, sizes
from results_tables.smollm2 import smollm2
from results_tables.systems import costs, systems


def everything() -> dict[str, Any]:
    """The variables of the template."""
    return {
        "family": family(), "drafters": drafters(), "blocks": blocks(), "evidence": evidence(),
        "assisted": assisted(),
        "on_cpu": on_cpu(), "shapes": shapes(), "bits": bits(), "one_chip": one_chip(), "plans": plans(),
        "published": published(), "kernels": kernels(), "gpu": gpu(),
        "rules": compared(), "phrases": phrases(), "refill": refill(), "systems": systems(), "costs": costs(),
        "smollm2": smollm2(), "sizes": sizes(), "shift": shift(), "mutants": mutants(), "checks": checks(),
        "kills": kills(), "same_cost": same_cost(), "fair": fair(),
    }  # fmt: skip
