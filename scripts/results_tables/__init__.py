"""The figures of docs/results.md, smollm2.md and rules-compared.md, read from the JSON under scripts/results."""

from __future__ import annotations

from typing import Any

from results_tables.checks import checks
from results_tables.evidence import assisted, evidence
from results_tables.mutants import mutants
from results_tables.pair import blocks, drafters, family, speed
from results_tables.phrases import phrases
from results_tables.rules import compared
from results_tables.scale import kernels, plans, refill, scale, shift, sizes, starts
from results_tables.smollm2 import smollm2
from results_tables.studies import contexts, studies
from results_tables.systems import costs, systems


def everything() -> dict[str, Any]:
    """The variables of the template."""
    return {
        "speed": speed(), "family": family(), "drafters": drafters(), "blocks": blocks(), "evidence": evidence(),
        "assisted": assisted(), "studies": studies(),
        "contexts": contexts(), "scale": scale(), "plans": plans(), "kernels": kernels(), "rules": compared(),
        "phrases": phrases(), "refill": refill(), "systems": systems(), "costs": costs(), "smollm2": smollm2(),
        "sizes": sizes(), "shift": shift(), "starts": starts(), "mutants": mutants(), "checks": checks(),
    }  # fmt: skip
