"""Rules by name: from the table, with weights, and from a user's file."""

import pytest

from mars_jax import contrib, verify
from mars_jax.core.rule import LoadedRule
from mars_jax.utils.user_code import load_function
from mars_jax.verify import find
from tests.helpers.checkpoint_files import message

SOURCE = """
from __future__ import annotations

from typing import Literal

from mars_jax import verify

RUNS = []
NOTHING = 3


def gate(
    entropy: float = 1, *, most: int = 2, on: bool = True, kind: Literal["a", "b"] = "a", word="x", base=None,
    floor: float | None = None,
):
    '''Relax where the entropy is high.

    More of it.
    '''
    RUNS.append((entropy, most, on, kind, word, base, floor))
    return verify.mars(base=base)


def needy(level: float):
    return verify.exact()


def loaded(scale: float = 1.0):
    from mars_jax.core.rule import LoadedRule

    return LoadedRule(verify.exact(), {"scale": scale})


def unsayable(table):
    return verify.exact()
"""


@pytest.fixture
def rules_file(tmp_path):
    file = tmp_path / "gates.py"
    file.write_text(SOURCE)
    return str(file)


def test_a_name_of_the_table_is_its_factory():
    assert verify.load("exact") == LoadedRule(verify.exact())
    assert verify.load("mars", margin="gap", theta=1.5).rule.name == verify.mars(margin="gap").name
    assert verify.load("rejection", block=True).rule == verify.rejection(block=True)
    blocks = verify.load("mars", base="rejection", block=True).rule
    assert blocks.base == verify.rejection(block=True)
    assert verify.load("mars", base=verify.rejection(block=True)).rule == blocks
    assert verify.load("simulated", tau=2.0).rule.name == contrib.simulated(2.0).name


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        ("marz", {}, "there is no rule 'marz' (did you mean mars?)"),
        ("mars", {"tau": 2}, "the rule mars has no setting 'tau': it has theta, margin, base, max_relaxed_run"),
        ("mars", {"theta": 1.5}, "theta is 1.5: expected"),
        ("mars", {"base": ["exact"]}, "base is ['exact'] (did you mean exact?): expected one of exact, rejection"),
        ("mars", {"base": "mars"}, "base is 'mars': expected one of exact, rejection."),
        ("exact", {"theta": 0.9}, "the rule exact has no setting 'theta': it has none."),
        ("simulated", {}, "the rule simulated needs a tau"),
        ("mars:weights", {}, "the rule is mars:weights: mars has no weights, so give only its name."),
        ("learned", {}, "the rule learned needs weights: name them, as learned:PATH."),
        ("learned:nowhere", {}, "there is no readable config.json in 'nowhere' (No such file"),
        ("nowhere.py:gate", {}, "the file of a rule 'nowhere.py' cannot be read (No such file"),
        ("no.such.module:gate", {}, "the rule is no.such.module:gate: the module 'no.such.module' cannot be imported"),
        ("mars_jax.verify:MARGINS", {}, "the rule is mars_jax.verify:MARGINS: MARGINS is not callable"),
    ],
)  # fmt: skip
def test_a_bad_name_or_setting_gets_one_sentence(spec, settings, expected):
    assert message(verify.load, spec, **settings).startswith(expected)


def test_a_users_file_is_read_by_its_signature(rules_file):
    row = find(f"{rules_file}:gate")
    assert (row.name, row.help, row.lossless) == ("gate", "Relax where the entropy is high", False)
    settings = {s.name: (s.kind, s.default, s.per_row, tuple(s.choices)) for s in row.settings.values()}
    assert settings == {
        "entropy": (float, 1.0, True, ()),
        "most": (int, 2, True, ()),
        "on": (bool, True, False, ()),
        "kind": (str, "a", False, ("a", "b")),
        "word": (str, "x", False, ()),
        "floor": (float, None, True, ()),
    }


def test_a_users_settings_reach_their_factory(rules_file):
    loaded = verify.load(f"{rules_file}:gate", entropy=[0.5, 2.0], kind="b", base=verify.rejection())
    assert loaded.params == () and loaded.rule.base == verify.rejection()
    runs = load_function(f"{rules_file}:gate").__globals__["RUNS"]
    assert runs == [([0.5, 2.0], 2, True, "b", "x", verify.rejection(), None)]
    assert verify.load(f"{rules_file}:needy", level=1.0).rule == verify.exact()
    assert verify.load(f"{rules_file}:loaded", scale=2.0) == LoadedRule(verify.exact(), {"scale": 2.0})


def test_a_users_module_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "own_gates_of_a_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/"])
    assert verify.load("own_gates_of_a_test:gate", most=3).rule == verify.mars()


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (
            "gate",
            {"theta": 1.0},
            "the rule gate has no setting 'theta': it has entropy, most, on, kind, word, floor.",
        ),
        ("gate", {"most": 1.5}, "most is 1.5: expected a whole number from"),
        ("gate", {"kind": "c"}, "kind is 'c': expected one of a, b."),
        ("needy", {}, "the rule needy needs a level: give a number."),
        ("unsayable", {}, "unsayable: its argument 'table' has no default"),
        ("NOTHING", {}, "NOTHING is not callable"),
    ],
)
def test_a_users_rule_and_settings_are_checked(rules_file, name, settings, expected):
    assert expected in message(verify.load, f"{rules_file}:{name}", **settings)


def test_a_file_is_read_again_only_after_an_edit(rules_file):
    first = load_function(f"{rules_file}:gate")
    assert load_function(f"{rules_file}:gate") is first
    with open(rules_file, "a") as file:
        file.write("\n")
    assert load_function(f"{rules_file}:gate") is not first
