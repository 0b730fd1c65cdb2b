"""The colours of Okabe and Ito, and which of them is whose: the same in every picture.

People with any kind of colour vision tell these colours apart (Okabe and Ito 2008, "Color Universal Design"). Baselines
are grey and black, and rules that relax have colours. No two rules share colour and marker.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mars_jax import specs

BLACK, GREY = "#222222", "#888888"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Colours of lines without a colour of their own, such as the figures of a log, one after the other."""
LIGHT = "#DDDDDD"
"""Colour of what is beside the point: zero lines, pieces of a bar without a part of their own."""


class Look(NamedTuple):
    """Colour and marker of a rule, a way to decode, or a kind of token."""

    colour: str
    marker: str = "o"
    open: bool = False  # the marker has the paper's colour inside

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` and `Axes.errorbar`."""
        inside = "white" if self.open else self.colour
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": inside}


ALONE = Look(GREY, "s")
EXACT = Look(BLACK, "D", open=True)
OTHER = Look(PURPLE, "D")
"""A rule of the user's."""
_CHOSEN = {
    "exact": EXACT,
    "rejection": Look(BLACK, "P", open=True),
    "mars": Look(BLUE),
    "adaptive": Look(VERMILLION),
    "topk": Look(GREEN),
    "budget": Look(PURPLE),
    "typical": Look(ORANGE),
    "entropy_gate": Look(SKY),
    "fly": Look(VERMILLION, "s"),
    "learned": Look(GREEN, "s"),
    "phrase": Look(PURPLE, "s"),
    "equivalent": Look(ORANGE, "s"),
    "mixture": Look(SKY, "s"),
    "diversed": Look(VERMILLION, "^"),
    "lenience": Look(GREEN, "^"),
    "nucleus": Look(PURPLE, "^"),
    "cactus": Look(ORANGE, "^"),
    "speccascade": Look(SKY, "^"),
    "mentored": Look(PURPLE, "v"),
    "fuzzy": Look(ORANGE, "v"),
    "released": Look(VERMILLION, "v"),
    "simulated": Look(GREY, "*"),
}


VARIANTS = {"gap": "^", "opt": "v", "over rejection": "s"}
"""Markers of a rule with another margin or base than its own, in the rule's colour."""
OTHERS = {
    "autoregressive": ALONE,
    "target alone": ALONE,
    "autoregressive top_k=2": Look(GREY, "v"),
    "top_k=2": Look(GREY, "v"),
    "low-margin sampling": Look(GREY, "X"),
    "low margin": Look(GREY, "X"),
    "block": Look(BLACK, "X", open=True),
    "transformers": Look(ORANGE, "h"),
}
"""Looks of decoders that are no rule, or of ways to run one."""


def _looks() -> dict[str, Look]:
    """The looks chosen above; the other rules of the table get unused ones, in the order of the table."""
    made = dict(_CHOSEN)
    free = (Look(colour, marker) for marker in "v<>ph8*dHX" for colour in COLOURS[:-1])
    for name in specs.RULES:
        if name not in made:
            made[name] = next(look for look in free if look not in {*made.values(), *OTHERS.values(), OTHER})
    return made


RULES = _looks()
"""By the names of `specs.RULES`."""

KINDS = {"accepted": GREEN, "relaxed": ORANGE, "rejected": VERMILLION}
"""Colours of drafted tokens."""


def look(name: str) -> Look:
    """The look of a rule, an arm of a benchmark, or a family of settings, by its name.

    >>> look("mars theta=0.9") == look("mars") == RULES["mars"]
    True
    >>> look("mars(gap) matched"), look("gates.py:entropy_gate")
    (Look(colour='#0072B2', marker='^', open=False), Look(colour='#CC79A7', marker='D', open=False))
    """
    if name in OTHERS:
        return OTHERS[name]
    found = re.match(r"([\w-]+)(?: ?\((\w+)\))?( over rejection)?(?=$|[ ,])", name)
    if not found or found[1] not in RULES:
        return OTHER
    chosen = RULES[found[1]]
    variant = VARIANTS.get(found[2] or "") or VARIANTS.get((found[3] or "").strip())
    return chosen._replace(marker=variant) if variant else chosen
