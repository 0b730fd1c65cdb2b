"""The figures of docs/results.md, read from the JSON under scripts/results: one function for each section."""

from __future__ import annotations

from typing import Any

from results_tables.evidence import assisted, evidence
from results_tables.pair import drafters, family, speed
from results_tables.scale import kernels, plans, scale
from results_tables.studies import contexts, studies


def everything() -> dict[str, Any]:
    """The variables of the template."""
    return {
        "speed": speed(), "family": family(), "drafters": drafters(), "evidence": evidence(),
        "assisted": assisted(), "studies": studies(),
        "contexts": contexts(), "scale": scale(), "plans": plans(), "kernels": kernels(),
    }  # fmt: skip
