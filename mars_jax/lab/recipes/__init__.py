"""Recipes: the flags of `mars-jax benchmark` that reproduce a published table, in one file per pair of models.

A recipe is measured twice. The first part follows the published table, in which the rule and the strict rule use the
same draft. In the second part, every arm uses its best draft length.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from mars_jax.cli.flags import without
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.paths import check_path
from mars_jax.utils.types import JsonObject

FOLDER = Path(__file__).parent
PARTS = ("paper", "tuned")
"""Folders that a run creates: one for the table as published, and one for the arms at their best draft lengths."""
TASKS = (
    "mt_bench=HuggingFaceH4/mt_bench_prompts",
    "humaneval=openai/openai_humaneval",
    "gsm8k=openai/gsm8k",
    "alpaca=tatsu-lab/alpaca",
    "cnn_dm=abisee/cnn_dailymail",
    "wmt19=wmt/wmt19",
)
"""The question sets of the MARS paper (arXiv 2601.15498), on the Hugging Face hub."""
FLAGS: JsonObject = {"task": TASKS, "problems": 80, "max-new-tokens": 1024, "tune": (), "chat": True}
"""Default flags of a recipe. Every task uses 80 problems, because MT-Bench has 80."""
SHAPES = ("--tree", "--num-draft-tokens", "--draft-size", "--any-rule")
OWN = {"paper": ("--controls", "--refine", *SHAPES), "tuned": ("--tune", "--draft-cost")}
"""Flags that apply to only one of the two parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The contents of a recipe file."""

    name: str
    about: str = ""
    source: str = ""  # source of the published figures
    flags: Mapping[str, object]  # flags of both parts
    # Additional flags of the first part.
    paper: Mapping[str, object] = dataclasses.field(default_factory=dict)
    # A TPU slice on which the pair fits, and its mesh.
    slice: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Published values for the strict and the relaxed rule, keyed by the name of the figure.
    published: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    def argv(self, part: str, user_flags: Sequence[str]) -> list[str]:
        """Return the flags for one of `PARTS`, followed by the user's flags.

        >>> read_recipe("qwen3-8b").argv("paper", ["--problems", "4"])[-2:]
        ['--problems', '4']
        """
        part_flags = {**FLAGS, **self.flags}
        if part == "paper":
            del part_flags["tune"]
            part_flags |= self.paper
            user_flags = without(user_flags, OWN["tuned"])
        else:
            user_flags = without(user_flags, OWN["paper"])
        names = {word.partition("=")[0] for word in user_flags}
        if names & {"--draft", *SHAPES}:
            # The user's draft replaces the recipe's tree.
            names.add("--tree")
        flag_words = (_words(name, value) for name, value in part_flags.items() if f"--{name}" not in names)
        return [*itertools.chain(*flag_words), *user_flags]


def _words(name: str, value: object) -> list[str]:
    """Return a flag and its values as a list of command-line arguments.

    >>> _words("task", ["a", "b"]), _words("chat", True), _words("tune", ()), _words("temperatures", ["0", "1"])
    (['--task', 'a', '--task', 'b'], ['--chat'], ['--tune'], ['--temperatures', '0', '1'])
    """
    if value is True:
        return [f"--{name}"]
    if not isinstance(value, list | tuple):
        value = [value]
    if name == "task":
        return [word for task in value for word in ("--task", str(task))]
    return [f"--{name}", *map(str, value)]


def names() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def read_recipe(name: str) -> Recipe:
    """Read a recipe by its name, or a user's recipe by its path.

    Raises:
      MarsError: there is no recipe with that name, or the file is not a recipe.

    >>> read_recipe("llama-3.1-8b").published["tau"]
    [4.82, 6.61]
    """
    check_path(name, "the recipe")
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        suggestion = did_you_mean(name, names())
        raise MarsError(f"there is no recipe {name!r}{suggestion}: choose from {', '.join(names())}.")
    try:
        recipe = Recipe(name=path.stem, **tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
        raise MarsError(
            f"'{path}' is no recipe ({error}): its parts are about, source, flags, paper, slice, published."
        ) from None
    if not {"target", "draft"} <= recipe.flags.keys():
        raise MarsError(f"'{path}' is no recipe: its [flags] name a target and a draft.")
    return recipe


def measured(summary: JsonObject) -> dict[str, float]:
    """Return the speed and tau of the strict rule and of the relaxed rule, averaged over the tables of summary.json.

    Papers report such averages. If answers are scored, the result also includes the share of the target's score that
    the relaxed rule retains.

    >>> arms = [{"role": r, "speedup": s, "tau": s, "recovered": 1.0} for r, s in (("strict", 2.0), ("rule", 3.0))]
    >>> measured({"tables": [{"arms": arms}]})
    {'strict speed': 2.0, 'strict tau': 2.0, 'rule speed': 3.0, 'rule tau': 3.0, 'recovered': 1.0}
    """
    values_by_name: dict[str, list[float]] = {}
    for table in summary["tables"]:
        # If the rule has several arms, use the first one, because its threshold is also that of the controls.
        arm_by_role = {arm["role"]: arm for arm in reversed(table["arms"])}
        for role in ("strict", "rule"):
            values_by_name.setdefault(f"{role} speed", []).append(arm_by_role[role]["speedup"])
            values_by_name.setdefault(f"{role} tau", []).append(arm_by_role[role]["tau"])
        share_kept = arm_by_role["rule"]["recovered"]
        # A likelihood above that of the target's own samples is not an improvement.
        if share_kept is not None and math.isfinite(share_kept) and table.get("metric") != "likelihood":
            values_by_name.setdefault("recovered", []).append(share_kept)
    return {name: fmean(values) for name, values in values_by_name.items()}


def table(recipe: Recipe, output: Path) -> str:
    """Return a Markdown table that compares the published figures with those of the run in the folder `output`."""
    from mars_jax.lab.evaluate.benchmark.report import render

    means = measured(json.loads((output / PARTS[0] / "summary.json").read_text(encoding="utf-8")))
    return render("recipe.md.jinja", FOLDER, recipe=recipe, means=means)
