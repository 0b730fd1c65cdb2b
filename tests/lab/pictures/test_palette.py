"""Colours are fixed: every rule has one, and no two rules look alike."""

from __future__ import annotations

from collections import Counter

import pytest

from mars_jax import specs
from mars_jax.lab.pictures.palette import KINDS, OTHER, OTHERS, PARTS, RULES, look


def test_every_rule_has_its_look_and_no_two_are_alike():
    assert list(RULES.keys() ^ specs.RULES.keys()) == []
    looks = Counter(RULES.values())
    assert [how for how, count in looks.items() if count > 1] == []
    assert not {*RULES.values()} & {*OTHERS.values()} and OTHER not in looks


def test_parts_and_kinds_differ_in_colour():
    assert len({*PARTS.values()}) == len(PARTS) and len({*KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (
            ("mars", "mars theta=0.9", "mars theta=inf", "mars (ratio)", "mars max_relaxed_run=2 theta=0.9"),
            "mars",
        ),
        (("mars(gap) matched", "mars (gap)"), "mars(gap)"),
        (("exact", "exact refined"), "exact"),
        (("autoregressive", "target alone"), "autoregressive"),
        (("speccascade (token_v3)", "speccascade"), "speccascade"),
        (("gates.py:entropy_gate", "marshmallow", "mars2 theta=1", "exactly"), "of my own"),
    ],
)
def test_a_name_with_settings_is_still_its_rule(names, same):
    assert {look(name) for name in names} == {look(same)}


def test_variants_keep_the_colour_and_change_the_marker():
    plain, others = look("mars"), [look(f"mars {v}") for v in ("(gap)", "over rejection")]
    assert {other.colour for other in others} == {plain.colour}
    assert len({plain.marker, *(other.marker for other in others)}) == 3
