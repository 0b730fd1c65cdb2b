"""Cases of drafters on surfaces with drawn settings. All rules of a case decode in one batch."""

import dataclasses
import functools
import hashlib
import itertools
from typing import Any

from mars_jax.drafters.registry import DraftDefinition, definition, definitions
from mars_jax.verify import Definition, RuleChoice, rules

WINDOW, TAU = 1, 2.0
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_draft_tokens": 4},
    "tree": {"tree": "2-2-1"},
    "dynamic": {"tree": "dynamic:2-3-6"},
    "auto": {"num_draft_tokens": 3, "draft_size": "auto"},  # two sizes, 0 and 3
    "rounds": {"num_draft_tokens": 6},  # systems that trust draft tokens without the target
    "nothing": {},
}


def _shapes(row: DraftDefinition) -> list[str]:
    """Return the shapes that a drafter supports."""
    if row.name == "none":
        return ["nothing"]
    if row.trusts:
        return ["rounds"]
    chains = row.length is not None or row.block
    supported = {"chain": chains, "tree": row.trees, "dynamic": row.dynamic, "auto": row.resizes}
    return [shape for shape in supported if supported[shape]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A row of the table with at most one structural choice: a base, a margin, whole blocks."""

    definition: Definition
    choices: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return " ".join([self.definition.name, *(f"{name}={value}" for name, value in self.choices)])

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        return RuleChoice(self.definition.name, dict(self.choices)).needs

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that relax often: the loosest value in the grid of the first number, and fixed values."""
        settings = dict(self.choices)
        structure = {n: s.default for n, s in self.definition.settings.items() if s.choices} | settings
        for name, setting in self.definition.settings.items():
            if name == "window":
                settings[name] = WINDOW
            elif setting.default is None:
                settings[name] = TAU
            elif (grid := setting.range(**structure).grid) and len(settings) == len(self.choices):
                settings[name] = grid[-1]
        return settings


def _choices(row: Definition) -> list[Rule]:
    """Return the rule with its defaults, and with each other structural choice."""
    rules = [Rule(row, ())]
    for name, setting in row.settings.items():
        values = setting.choices or ((False, True) if setting.kind is bool else ())
        rules += [Rule(row, ((name, value),)) for value in values if value != setting.default]
    return rules


DRAFTERS = [(row, shape) for row in definitions().values() for shape in _shapes(row)]
RULES = [rule for row in rules().values() for rule in _choices(row)]
SURFACES = ("generate", "refill", "text", "chat")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.9),
    "constraint": ("regex", "json_schema", "choice", "allowed_tokens", None),
    "edits": (None, "bans", "penalties"),
    "span": (None, "relax_in", "strict_in"),
    "weights": ("float32", "float32", "bfloat16", "int8", "int4"),
    "cache": (None, None, "bfloat16", "int8"),
    "mesh": (None,) * 8 + ("data=2", "model=2", "data=2,model=2"),
    "log_probs": (False, True),
    "stop_strings": (False, True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    drafter: str
    shape: str
    drawn: bool  # rules that need the draft's q, with drafts sampled from it
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
    def definition(self) -> DraftDefinition:
        return definition(self.drafter)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return _rules(self.drafter, self.shape, self.drawn)

    def __str__(self) -> str:
        parts = [self.drafter, self.shape, "drawn" if self.drawn else "", self.surface]
        parts += [str(getattr(self, name)) for name in SETTINGS if getattr(self, name) not in (None, False)]
        return ", ".join(part for part in parts if part)


def refusal(drafter: DraftDefinition, shape: str, rule: Rule) -> str | None:
    """Return a part of the error message for a drafter with a rule, or None if they work together."""
    if drafter.name == "none" and "draft" in rule.needs:
        return "none"
    if "chain" in rule.needs and shape in ("tree", "dynamic"):
        return "chain"
    if "long" in rule.needs and not drafter.stops:
        return "simulated does not apply"
    if shape == "auto" and not rule.definition.lossless:
        return "lossy"
    return None


@functools.cache
def _rules(drafter: str, shape: str, drawn: bool) -> tuple[Rule, ...]:
    """Return the rules of a case. Trusted tokens never reach a rule, so trusting drafters only need the defaults."""
    row = definition(drafter)
    rules = [rule for rule in RULES if refusal(row, shape, rule) is None and ("q" in rule.needs) == drawn]
    return tuple(rule for rule in rules if not (row.trusts and rule.choices))


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return cases that cover the pairs of a drafter, a surface and settings that `_product` draws.

    Each next case is the one of `_product` with the most pairs that no earlier case has.
    """
    pairs = {case: _pairs(case) for case in _product()}
    missing = set[Any]().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(pairs, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return tuple(chosen)


def _pairs(case: Case) -> set[Any]:
    values = [(name, getattr(case, name)) for name in ("drafter", "surface", *SETTINGS)]
    pairs: set[Any] = set(itertools.combinations(values, 2))
    if case.surface != "chat":  # only the other surfaces compare each rule with the target without a draft
        pairs.add((case.drafter, case.shape, case.drawn))
    return pairs


def _product() -> list[Case]:
    """Return a case for every drafter on every surface, drawn or not, each with its own draw of settings."""
    products = itertools.product(DRAFTERS, (False, True), SURFACES)
    names = [(row.name, shape, drawn, surface) for (row, shape), drawn, surface in products]
    return [_draw(*name) for name in names if _rules(*name[:3])]


def _draw(drafter: str, shape: str, drawn: bool, surface: str) -> Case:
    draw = hashlib.sha256(f"{drafter} {shape} {drawn} {surface}".encode()).digest()
    settings = {name: levels[draw[i] % len(levels)] for i, (name, levels) in enumerate(SETTINGS.items())}
    if surface == "chat" and str(settings["mesh"]).startswith("data=2"):
        settings["mesh"] = None  # a chat has one row, which cannot be divided
    return Case(drafter, shape, drawn, surface, **settings)
