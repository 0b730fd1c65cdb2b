"""Rules of single papers. Importing this package registers them; it is a plugin of `mars_jax.plugins`."""

from mars_jax.contrib.rules import (
    budget,
    cactus,
    diversed,
    entropy_gate,
    equivalent,
    fly,
    fuzzy,
    learned,
    lenience,
    mentored,
    phrase,
    released,
    simulated,
    speccascade,
)

__all__ = [
    "budget",
    "cactus",
    "diversed",
    "entropy_gate",
    "equivalent",
    "fly",
    "fuzzy",
    "learned",
    "lenience",
    "mentored",
    "phrase",
    "released",
    "simulated",
    "speccascade",
]
