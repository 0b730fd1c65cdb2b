"""What the tables of drafters and rules allow, and which of it the documents refuse.

A new row of `specs` is a level here without a line of its own. A case is a drafter on a surface, and every rule that
the drafter can have decodes in rows of its own there (`among.py`), so that every triple of drafter, rule and surface
is driven. What else there is to choose is spread over cases and rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from typing import Any

from mars_jax import specs

WINDOW, TAU = 1, 2.0
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_draft_tokens": 4},
    "tree": {"tree": "2-2-1"},
    "dynamic": {"tree": "dynamic:2-3-6"},
    "auto": {"num_draft_tokens": 4, "draft_size": "auto"},
    "rounds": {"num_draft_tokens": 6},  # of systems that vouch for their drafts
    "nothing": {},
}


def _shapes(row: specs.DraftRow) -> list[str]:
    """What a drafter can draft, by its row."""
    if row.name == "none":
        return ["nothing"]
    if row.trusts:
        return ["rounds"]
    chains = row.length is not None or row.block
    has = {"chain": chains, "tree": row.trees, "dynamic": row.dynamic, "auto": row.resizes}
    return [shape for shape, there in has.items() if there]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A row of the table with one of its choices: a base, a margin, whole blocks."""

    row: specs.RuleRow
    chosen: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return " ".join([self.row.name, *(f"{name}={value}" for name, value in self.chosen)])

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        return specs.RuleChoice(self.row.name, dict(self.chosen)).needs

    @property
    def settings(self) -> dict[str, Any]:
        """Numbers that relax much: the loosest of the grid that a row has for its first number."""
        made = dict(self.chosen)
        structure = {n: s.default for n, s in self.row.settings.items() if s.choices} | made
        for name, setting in self.row.settings.items():
            if name == "window":
                made[name] = WINDOW
            elif setting.default is None:
                made[name] = TAU
            elif (grid := setting.range(**structure).grid) and len(made) == len(self.chosen):
                made[name] = grid[-1]
        return made


def _choices(row: specs.RuleRow) -> list[Rule]:
    """The usual choices, and each other one alone."""
    found = [Rule(row, ())]
    for name, setting in row.settings.items():
        others = setting.choices or ((False, True) if setting.kind is bool else ())
        found += [Rule(row, ((name, choice),)) for choice in others if choice != setting.default]
    return found


DRAFTERS = [(row, shape) for row in specs.DRAFTERS.values() for shape in _shapes(row)]
RULES = [rule for row in specs.RULES.values() for rule in _choices(row)]
SURFACES = ("generate", "refill", "text", "chat", "insert")
OTHERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.9),
    "constraint": ("regex", "json_schema", "choice", "allowed_tokens", None),
    "edits": (None, "bans", "penalties"),
    "span": (None, "relax_in", "strict_in"),
    "weights": ("float32", "float32", "bfloat16", "int8", "int4"),
    "cache": (None, None, "bfloat16", "int8"),
    "mesh": (None, None, None, None, None, None, None, None, "data=2", "model=2", "data=2,model=2"),
    "log_probs": (False, True),
    "stop_strings": (False, True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    drafter: str
    shape: str
    drawn: bool  # by the rules that need a draft's q, for which it is drawn where it can be
    surface: str
    temperature: float
    constraint: str | None
    edits: str | None
    span: str | None
    weights: str
    cache: str | None
    mesh: str | None
    log_probs: bool
    stop_strings: bool

    @property
    def row(self) -> specs.DraftRow:
        return specs.DRAFTERS[self.drafter]

    @property
    def rules(self) -> tuple[Rule, ...]:
        return _rules(self.drafter, self.shape, self.drawn)

    def __str__(self) -> str:
        *first, drawn, surface = (self.drafter, self.shape, "drawn" if self.drawn else "", self.surface)
        others = [str(getattr(self, name)) for name in OTHERS if getattr(self, name) not in (None, False)]
        return ", ".join(x for x in (*first, drawn, surface, *others) if x)

    def pairs(self) -> set[tuple[Any, ...]]:
        """Pairs of levels; every rule of the case is a level."""
        levels = [(name, getattr(self, name)) for name in ("surface", *OTHERS)]
        levels.append(("drafter", (self.drafter, self.shape)))
        found = set(itertools.combinations(levels, 2))
        return found | {(level, ("rule", str(rule))) for rule in self.rules for level in levels}


def refusal(drafter: specs.DraftRow, shape: str, rule: Rule) -> str | None:
    """What the sentence that refuses a drafter and a rule says, or None: as their rows have it."""
    needs = rule.needs
    if drafter.name == "none" and "draft" in needs:
        return "none"
    if "chain" in needs and shape in ("tree", "dynamic"):
        return "chain"
    if "long" in needs and not drafter.stops:
        return "simulated does not apply"
    if shape == "auto" and not rule.row.lossless:
        return "lossy"
    return None


@functools.cache
def _rules(drafter: str, shape: str, drawn: bool) -> tuple[Rule, ...]:
    """Those that a drafter can have, as it drafts."""
    row = specs.DRAFTERS[drafter]
    return tuple(
        rule
        for rule in RULES
        if refusal(row, shape, rule) is None and worth(row, rule) and ("q" in rule.needs) == drawn
    )


def worth(drafter: specs.DraftRow, rule: Rule) -> bool:
    """A rule never sees what a drafter vouches for, so with such drafters its usual choices do."""
    return not (drafter.trusts and rule.chosen)


TRIES = 24


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every drafter on every surface, drawn or not; of some draws of the others the one with most new pairs."""
    made: list[Case] = []
    seen: set[tuple[Any, ...]] = set()
    for (row, shape), drawn, surface in itertools.product(DRAFTERS, (False, True), SURFACES):
        tried = [_drawn(row.name, shape, drawn, surface, number) for number in range(TRIES)]
        if not tried[0].rules:
            continue
        made.append(max(tried, key=lambda case: len(case.pairs() - seen)))
        seen |= made[-1].pairs()
    return tuple(made)


def _drawn(drafter: str, shape: str, drawn: bool, surface: str, number: int) -> Case:
    draw = hashlib.sha256(f"{drafter} {shape} {drawn} {surface} {number}".encode()).digest()
    others = {name: levels[draw[i] % len(levels)] for i, (name, levels) in enumerate(OTHERS.items())}
    if surface in ("chat", "insert") and str(others["mesh"]).startswith("data=2"):  # one row is not divided
        others["mesh"] = None
    return Case(drafter, shape, drawn, surface, **others)


def fast(count: int) -> list[Case]:
    """Greedily those with most pairs that no earlier one has, of those that compile soon.

    They have no mesh, chains, and one program.
    """
    soon = [c for c in cases() if c.shape == "chain" and c.surface == "generate" and not (c.mesh or c.drawn)]
    left = {case: case.pairs() for case in soon}
    chosen: list[Case] = []
    while len(chosen) < count:
        best = max(left, key=lambda case: len(left[case]))
        gone = left.pop(best)
        chosen.append(best)
        for pairs in left.values():
            pairs -= gone
    return chosen
