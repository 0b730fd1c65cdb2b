"""The rules by name, with their settings, ranges, defaults and needs. No jax.

A new rule is one file in `mars_jax/contrib/rules`, one row of `RULES` and one case of the tests; see CONTRIBUTING.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mars_jax.core.errors import MarsError, did_you_mean
from mars_jax.core.settings import LARGEST_FLOAT, LARGEST_INT, Range, Setting, by_name
from mars_jax.specs.row import (
    BASE,
    BLOCK,
    CONTRIB,
    EXACT,
    EXACT_PREFIX,
    MARGINS,
    REJECTION,
    Rule,
    distributions,
    edges,
    number,
)


def _share(words: str, grid: tuple[float, ...]) -> Range:
    return Range(words, 0, 1, above=True, inf=True, grid=grid)


def _nats(words: str, grid: tuple[float, ...]) -> Range:
    return Range(words, 0, LARGEST_FLOAT, grid=grid)


_RATIOS = (0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
_GAPS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
_ODDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.01)
_HARMS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_NATS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0)
_ENTROPIES = (4.0, 3.5, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0, 0.8, 0.6, 0.4, 0.2)
_UNSURE = (1.05, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_WHOLE = Range("a whole number of at least 0", 0, LARGEST_INT)
_SHIFT = Range(
    "a finite number, or inf, which is lossless",
    -LARGEST_FLOAT,
    LARGEST_FLOAT,
    inf=True,
    grid=(4.0, 3.0, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0),
)

RULES: dict[str, Rule] = {
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
                    "ratio": _share(
                        "a number above 0 and at most 1 for the margin ratio, or inf, which is strict",
                        grid=_RATIOS,
                    ),
                    "gap": Range(
                        "a number above 0 for the margin gap (inf is strict)", 0, above=True, grid=_GAPS
                    ),
                },
                "how near a tie must be; inf never relaxes",
                by="margin",
                flag=True,
            ),
        ),
        edges(
            "learned",
            "also keeps the runner-up where a trained head says that the outcome would not change",
            "after 2501.19309",
            number(
                "theta",
                0.1,
                _share("a probability, a number above 0 and at most 1, or inf, which is strict", grid=_HARMS),
                "chance of another outcome below which a token is relaxed; inf never relaxes",
                flag=True,
            ),
            needs=("weights",),
            home=CONTRIB,
        ),
        edges(
            "topk",
            "also keeps what is among the target's best tokens and near the best one",
            "TensorRT-LLM's relaxed acceptance",
            number(
                "k", 10, _WHOLE, "of the target's best tokens that may be kept; 0 never relaxes", kind=int
            ),
            number(
                "delta",
                0.6,
                _nats("a finite number of at least 0", grid=_NATS),
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
                _share("a probability, a number above 0 and at most 1, or inf, which is strict", grid=_ODDS),
                "probability that is always enough",
            ),
            number(
                "delta",
                0.3,
                Range("a number above 0; inf leaves it to epsilon", 0, above=True, grid=_ODDS),
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
                Range("a probability, a number from 0 to 1", 0, 1, grid=_HARMS),
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
                _share("a number above 0 and at most 1, or inf, which is strict", grid=_ODDS),
                "probability / best probability above which a token is kept; inf never relaxes",
                flag=True,
            ),
        ),
        edges(
            "entropy_gate",
            "also keeps the runner-up where the target's entropy is high",
            "after 2511.22972",
            number(
                "entropy",
                1.5,
                Range("a number of at least 0 (inf is strict)", 0, grid=_ENTROPIES),
                "nats above which the target is unsure; inf never relaxes",
            ),
            home=CONTRIB,
        ),
        edges(
            "fly",
            "also keeps what is drafted where the target is unsure, if it goes on as the target would",
            "2511.22972",
            number(
                "entropy",
                0.3,
                Range(
                    "a number from 0 to ln 3, or inf, which is strict", 0, math.log(3), inf=True, grid=_UNSURE
                ),
                "nats of the three largest probabilities from which the target is unsure; inf never relaxes",
            ),
            number(
                "window",
                6,
                _WHOLE,
                "tokens after it that must be the target's own; drafts must be longer",
                kind=int,
            ),
            base=None,
            home=CONTRIB,
        ),
        edges(
            "phrase",
            "also keeps what is drafted where it and what follows it cost little of the target's logits together",
            "after 2511.22972",
            number(
                "bound",
                1.0,
                Range(
                    "a finite number of at least 0 (0 is strict)",
                    0,
                    LARGEST_FLOAT,
                    grid=(0.25, 0.5, 1.0, 2.0, 4.0),
                ),
                "nats that the whole stretch may cost; 0 never relaxes",
            ),
            number(
                "window",
                2,
                _WHOLE,
                "tokens after it that belong to the stretch; drafts must be longer",
                kind=int,
            ),
            base=None,
            home=CONTRIB,
        ),
        edges(
            "equivalent",
            "also keeps what means the same as the target's token, by a table",
            "after 2601.15498",
            number(
                "gap",
                2.0,
                Range("a number of at least 0, or inf (0 is strict)", 0, grid=(0.5, 1.0, 2.0, 4.0)),
                "nats by which it may fall short of the target's best; 0 never relaxes",
            ),
            base=None,
            needs=("weights",),
            home=CONTRIB,
        ),
        edges(
            "budget",
            "also keeps what costs little of the target's logits, while a budget lasts",
            "2608.03447",
            number(
                "gap",
                0.25,
                _nats("a finite number of at least 0", grid=_NATS),
                "nats that a token may cost for each drafted token that is left",
            ),
            number(
                "max_relaxed",
                2,
                _WHOLE,
                "relaxed tokens that are allowed in a step; 0 never relaxes",
                kind=int,
            ),
            number(
                "total",
                8.0,
                Range("a number of at least 0", 0),
                "nats that all of them may cost, in a whole text",
            ),
            home=CONTRIB,
        ),
        distributions(
            "lenience",
            "speculative sampling that refuses a drafted token less often than it should",
            "2211.17192, appendix A.5",
            number(
                "factor",
                0.5,
                Range("a number above 0 and at most 1", 0, 1, above=True, grid=_ODDS),
                "of the draft's probability in every comparison; 1 is lossless",
            ),
            BLOCK,
            home=CONTRIB,
        ),
        distributions(
            "mixture",
            "follows a mixture of target and draft, by rejection",
            "2604.07622, with a static weight",
            number(
                "weight",
                0.5,
                Range("a number from 0 to 1", 0, 1, grid=_ODDS),
                "of the target in the mixture; 1 is lossless, 0 follows the draft",
            ),
            BLOCK,
        ),
        distributions(
            "diversed",
            "follows a mixture of target and draft, whose weight a trained head gives",
            "2604.07622",
            number(
                "shift",
                0.0,
                _SHIFT,
                "added to the head's log odds of the target; inf is lossless",
            ),
            BLOCK,
            needs=("weights",),
            home=CONTRIB,
        ),
        distributions(
            "cactus",
            "verifies against the target with more of the drafted token, within a divergence",
            "2604.04987",
            number(
                "divergence",
                0.1,
                _nats("a finite number of at least 0", grid=_HARMS),
                "how far the target is bent; 0 is lossless",
            ),
            chain=True,
            home=CONTRIB,
        ),
        distributions(
            "speccascade",
            "follows the draft where the target trusts it, by rejection",
            "2405.19261",
            Setting(
                name="trust",
                kind=str,
                default="token_v3",
                choices={
                    "token_v3": "tokens with p >= (1 - alpha) max p",
                    "opt": "positions, unless max q < max p - alpha TV(p, q)",
                },
                help="what is trusted",
            ),
            number(
                "alpha",
                0.1,
                {
                    "token_v3": Range("a number from 0 to 1 for token_v3", 0, 1, grid=_HARMS),
                    "opt": _nats("a finite number of at least 0 for opt", grid=_HARMS),
                },
                "how much is trusted",
                by="trust",
            ),
            BLOCK,
            home=CONTRIB,
        ),
        distributions(
            "released",
            "what the released code of MARS does along a chain, which is not the paper's rule",
            "the code of 2601.15498",
            number(
                "ratio",
                0.9,
                Range("a number above 0, or inf", 0, above=True, grid=_RATIOS),
                "second logit / best above which the two are taken with certainty; never strict",
            ),
            chain=True,
            home=CONTRIB,
        ),
        Rule(
            name="simulated",
            factory="mars_jax.verify.simulated:simulated",
            help="accepts by chance, to size hardware; its text means nothing",
            lossless=False,
            needs=("draft", "long"),
            paper="the rate: 2211.17192, equation 1",
            settings=by_name(
                number(
                    "tau",
                    None,
                    Range("a number of at least 1, the token that every step gives", 1, 1024),
                    "tokens per target forward, in the mean over steps",
                    flag=True,
                ),
                EXACT_PREFIX,
            ),
        ),
    )
}
"""The rules by name."""


def rule(name: str) -> Rule:
    """A row of `RULES`.

    Raises:
      MarsError: there is none of that name.

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
    """Raise MarsError unless `value` is in the range that the table gives a setting of a rule.

    Args:
      rule_name: of `RULES`.
      name: of the setting.
      value: one value, or an array or a list of one per row; a value that jax is tracing is not looked at.
      chosen: structural choices that the range depends on; default: their defaults.

    >>> check_setting("mars", "theta", 1.5, margin="gap")
    """
    rule(rule_name).check(name, value, **chosen)
