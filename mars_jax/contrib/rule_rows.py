"""Rows of the rules in `contrib`, which `specs.RULES` appends to the library's. Imports no jax."""

from __future__ import annotations

import functools
import math

from mars_jax.core.settings import LARGEST_FLOAT, Range, Setting, by_name
from mars_jax.specs import row
from mars_jax.specs.row import (
    BLOCK,
    EXACT_PREFIX,
    HARMS,
    NATS,
    ODDS,
    RATIOS,
    WHOLE,
    RuleRow,
    nats,
    number,
    share,
)

edges = functools.partial(row.edges, home="mars_jax.contrib.rules")
distributions = functools.partial(row.distributions, home="mars_jax.contrib.rules")

# Thresholds that `calibrate` and `benchmark` try, from strict to loose.
ENTROPIES = (4.0, 3.5, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0, 0.8, 0.6, 0.4, 0.2)
UNSURE = (1.05, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
SHIFT = Range(
    "a finite number, or inf, which is lossless",
    -LARGEST_FLOAT,
    LARGEST_FLOAT,
    inf=True,
    grid=(4.0, 3.0, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0),
)

RULES = (
    edges(
        "learned",
        "also keeps the runner-up where a trained head says that the outcome would not change",
        "after 2501.19309",
        number(
            "theta",
            0.1,
            share("a probability, a number above 0 and at most 1, or inf, which is strict", grid=HARMS),
            "chance of another outcome below which a token is relaxed; inf never relaxes",
            flag=True,
        ),
        needs=("weights",),
    ),
    edges(
        "entropy_gate",
        "also keeps the runner-up where the target's entropy is high",
        "after 2511.22972",
        number(
            "entropy",
            1.5,
            Range("a number of at least 0 (inf is strict)", 0, grid=ENTROPIES),
            "nats above which the target is unsure; inf never relaxes",
        ),
    ),
    edges(
        "fly",
        "also keeps what is drafted where the target is unsure, if it goes on as the target would",
        "2511.22972",
        number(
            "entropy",
            0.3,
            Range("a number from 0 to ln 3, or inf, which is strict", 0, math.log(3), inf=True, grid=UNSURE),
            "nats of the three largest probabilities from which the target is unsure; inf never relaxes",
        ),
        number(
            "window",
            6,
            WHOLE,
            "tokens after it that must be the target's own; drafts must be longer",
            kind=int,
        ),
        base=None,
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
            WHOLE,
            "tokens after it that belong to the stretch; drafts must be longer",
            kind=int,
        ),
        base=None,
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
    ),
    edges(
        "budget",
        "also keeps what costs little of the target's logits, while a budget lasts",
        "2608.03447",
        number(
            "gap",
            0.25,
            nats("a finite number of at least 0", grid=NATS),
            "nats that a token may cost for each drafted token that is left",
        ),
        number(
            "max_relaxed",
            2,
            WHOLE,
            "relaxed tokens that are allowed in a step; 0 never relaxes",
            kind=int,
        ),
        number(
            "total",
            8.0,
            Range("a number of at least 0", 0),
            "nats that all of them may cost, in a whole text",
        ),
    ),
    distributions(
        "lenience",
        "speculative sampling that refuses drafted tokens less often",
        "2211.17192, appendix A.5",
        number(
            "factor",
            0.5,
            Range("a number above 0 and at most 1", 0, 1, above=True, grid=ODDS),
            "factor of the draft's probability in every comparison; 1 is lossless",
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
            SHIFT,
            "added to the head's log odds of the target; inf is lossless",
        ),
        BLOCK,
        needs=("weights",),
    ),
    distributions(
        "cactus",
        "verifies against the target with more of the drafted token, within a divergence",
        "2604.04987",
        number(
            "divergence",
            0.1,
            nats("a finite number of at least 0", grid=HARMS),
            "how far the target is bent; 0 is lossless",
        ),
        chain=True,
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
                "token_v3": Range("a number from 0 to 1 for token_v3", 0, 1, grid=HARMS),
                "opt": nats("a finite number of at least 0 for opt", grid=HARMS),
            },
            "how much is trusted",
            by="trust",
        ),
        BLOCK,
    ),
    distributions(
        "mentored",
        "accepts the most that a divergence from the target allows",
        "2609.30474",
        number(
            "bound",
            0.1,
            nats("a finite number of at least 0", grid=HARMS),
            "nats that the text may be from the target at each token; 0 is lossless",
        ),
        BLOCK,
    ),
    distributions(
        "fuzzy",
        "accepts what is drafted wherever target and draft are alike, else by rejection",
        "2502.20704",
        Setting(
            name="distance",
            kind=str,
            default="js",
            choices={"js": "Jensen-Shannon divergence, nats", "tv": "total variation"},
            help="how they are compared",
        ),
        number(
            "bound",
            0.1,
            Range("a number from 0 to 1", 0, 1, grid=HARMS),
            "how far apart they may be; 0 is lossless",
        ),
        BLOCK,
    ),
    distributions(
        "released",
        "what the released code of MARS does along a chain, which is not the paper's rule",
        "the code of 2601.15498",
        number(
            "ratio",
            0.9,
            Range("a number above 0, or inf", 0, above=True, grid=RATIOS),
            "second logit / best above which the two are taken with certainty; never strict",
        ),
        chain=True,
    ),
    RuleRow(
        name="simulated",
        factory="mars_jax.contrib.rules.simulated:simulated",
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
