"""Table of the rules by name, with their settings, ranges, defaults and needs. Does not import jax.

Rules from single papers have their rows in `mars_jax/contrib/rule_rows.py`; see CONTRIBUTING.md to add a rule.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from mars_jax.core.errors import MarsError, did_you_mean
from mars_jax.core.settings import Range, Setting
from mars_jax.specs.row import (
    BASE,
    BLOCK,
    EXACT,
    HARMS,
    MARGINS,
    NATS,
    ODDS,
    RATIOS,
    REJECTION,
    WHOLE,
    RuleRow,
    distributions,
    edges,
    nats,
    number,
    share,
)

# Thresholds that `calibrate` and `benchmark` try for a gap, from strict to loose.
GAPS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)

RULES: dict[str, RuleRow] = {
    row.name: row
    for row in (
        EXACT,
        REJECTION,
        edges(
            "mars",
            "also keeps the target's runner-up where its two best tokens are nearly tied",
            "2601.15498",
            Setting(
                name="margin",
                kind=str,
                default="ratio",
                choices=MARGINS,
                flag=True,
                help="what theta bounds",
            ),
            number(
                "theta",
                0.9,
                {
                    "ratio": share(
                        "a number above 0 and at most 1 for the margin ratio, or inf, which is strict",
                        grid=RATIOS,
                    ),
                    "gap": Range(
                        "a number above 0 for the margin gap (inf is strict)", 0, above=True, grid=GAPS
                    ),
                },
                "how near a tie must be; inf never relaxes",
                by="margin",
                flag=True,
            ),
        ),
        edges(
            "topk",
            "also keeps what is among the target's best tokens and near the best one",
            "TensorRT-LLM's relaxed acceptance",
            number(
                "k", 10, WHOLE, "how many of the target's best tokens may be kept; 0 never relaxes", kind=int
            ),
            number(
                "delta",
                0.6,
                nats("a finite number of at least 0", grid=NATS),
                "nats by which they may be less likely than the best one",
            ),
        ),
        edges(
            "typical",
            "also keeps what is likely enough, where less is enough if the target is unsure",
            "2401.10774, section 2.3.1",
            number(
                "epsilon",
                0.09,
                share("a probability, a number above 0 and at most 1, or inf, which is strict", grid=ODDS),
                "probability that is always enough",
            ),
            number(
                "delta",
                0.3,
                Range("a number above 0; inf leaves it to epsilon", 0, above=True, grid=ODDS),
                "factor of exp(-entropy), a probability that is enough as well",
            ),
        ),
        edges(
            "nucleus",
            "also keeps what is in the nucleus of the target's distribution",
            "2610.07822",
            number(
                "mass",
                0.9,
                Range("a probability, a number from 0 to 1", 0, 1, grid=HARMS),
                "probability of the nucleus, after temperature and filters; 0 never relaxes",
            ),
            base=dataclasses.replace(BASE, default="rejection"),
        ),
        edges(
            "adaptive",
            "also keeps what is likely enough beside the target's best token",
            "2609.02897",
            number(
                "theta",
                0.3,
                share("a number above 0 and at most 1, or inf, which is strict", grid=ODDS),
                "probability / best probability above which a token is kept; inf never relaxes",
                flag=True,
            ),
        ),
        distributions(
            "mixture",
            "follows a mixture of target and draft, by rejection",
            "2604.07622, with a static weight",
            number(
                "weight",
                0.5,
                Range("a number from 0 to 1", 0, 1, grid=ODDS),
                "weight of the target in the mixture; 1 is lossless, 0 follows the draft",
            ),
            BLOCK,
        ),
        *importlib.import_module("mars_jax.contrib.rule_rows").RULES,
    )
}
"""Rules by name."""


def rule(name: str) -> RuleRow:
    """Return a row of `RULES`.

    Raises:
      MarsError: there is no rule of that name.

    >>> rule("exact").lossless
    True
    """
    if name not in RULES:
        raise MarsError(
            f"there is no rule '{name}'{did_you_mean(name, RULES)}: choose one of {', '.join(RULES)}, or "
            "name your own, as FILE.py:NAME or package.module:NAME."
        )
    return RULES[name]


def check_setting(rule_name: str, name: str, value: Any, **chosen: Any) -> None:
    """Raise MarsError unless `value` is in the range of a rule's setting in the table.

    Args:
      rule_name: name in `RULES`.
      name: name of the setting.
      value: one value, or an array or a list with one per row; a traced value is not checked.
      chosen: structural choices that determine the range; default: their defaults.

    >>> check_setting("mars", "theta", 1.5, margin="gap")
    """
    rule(rule_name).check(name, value, **chosen)
