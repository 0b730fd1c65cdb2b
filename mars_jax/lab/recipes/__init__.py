"""Recipes: the flags of `mars-jax benchmark` that reproduce a published table, in one file per pair of models.

A recipe is measured twice: as in its table, with the rule and the strict rule using the same draft, and with every arm
at its best draft length. This module does not import jax.
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
from typing import Any

from mars_jax.cli.flags import without
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.paths import check_path

FOLDER = Path(__file__).parent
PARTS = ("paper", "tuned")
"""The folders that a run creates: one for the table as published, and one for the arms at their best lengths."""
TASKS = (
    "mt_bench=HuggingFaceH4/mt_bench_prompts",
    "humaneval=openai/openai_humaneval",
    "gsm8k=openai/gsm8k",
    "alpaca=tatsu-lab/alpaca",
    "cnn_dm=abisee/cnn_dailymail",
    "wmt19=wmt/wmt19",
)
"""The question sets of the MARS paper (arXiv 2601.15498), on the Hugging Face hub."""
FLAGS: Mapping[str, Any] = {"task": TASKS, "problems": 80, "max-new-tokens": 1024, "tune": (), "chat": True}
"""Default flags of a recipe: 80 problems per task, the size of MT-Bench."""
SHAPES = ("--tree", "--num-draft-tokens", "--draft-size", "--any-rule")
OWN = {
    "paper": ("--controls", "--refine", *SHAPES),
    "tuned": ("--tune", "--draft-cost"),
}
"""Flags that apply to only one part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The contents of a recipe file."""

    name: str
    about: str = ""
    source: str = ""  # source of the published figures
    flags: Mapping[str, Any]  # flags of both parts
    paper: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # additional flags of the first part
    slice: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # a TPU slice that fits the pair, and its mesh
    published: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)  # strict -> relaxed

    def argv(self, part: str, given: Sequence[str]) -> list[str]:
        """Return the flags of a part of `PARTS`, with the user's flags last.

        >>> read_recipe("qwen3-8b").argv("paper", ["--problems", "4"])[-2:]
        ['--problems', '4']
        """
        part_flags = {**FLAGS, **self.flags}
        lengths = part_flags.pop("tune")
        part_flags |= {"tune": lengths} if part == "tuned" else self.paper
        given = without(
            given, [flag for other_part, flags in OWN.items() if other_part != part for flag in flags]
        )
        names = {word.partition("=")[0] for word in given}
        # If the user chooses a draft or a shape, drop the recipe's tree.
        names |= {"--tree"} if names & {"--draft", *SHAPES} else set()
        recipe_words = (_words(name, value) for name, value in part_flags.items() if f"--{name}" not in names)
        return [*itertools.chain(*recipe_words), *given]


def _words(name: str, value: Any) -> list[str]:
    """Return a flag with its values as command-line words.

    >>> _words("task", ["a", "b"]), _words("chat", True), _words("tune", ()), _words("temperatures", ["0", "1"])
    (['--task', 'a', '--task', 'b'], ['--chat'], ['--tune'], ['--temperatures', '0', '1'])
    """
    if name == "task":
        return [word for task in value for word in ("--task", task)]
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]


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
        raise MarsError(
            f"there is no recipe {name!r}{did_you_mean(name, names())}: choose from {', '.join(names())}."
        )
    try:
        recipe = Recipe(name=path.stem, **tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
        raise MarsError(
            f"'{path}' is no recipe ({error}): its parts are about, source, flags, paper, slice, published."
        ) from None
    if not {"target", "draft"} <= recipe.flags.keys():
        raise MarsError(f"'{path}' is no recipe: its [flags] name a target and a draft.")
    return recipe


def measured(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return means over the tables of summary.json, as papers report them.

    These are speed and tau of the strict rule and of the relaxed one, and the share of the score preserved, if any.

    >>> arms = [{"role": r, "speedup": s, "tau": s, "recovered": 1.0} for r, s in (("strict", 2.0), ("rule", 3.0))]
    >>> measured({"tables": [{"arms": arms}]})
    {'strict speed': 2.0, 'strict tau': 2.0, 'rule speed': 3.0, 'rule tau': 3.0, 'recovered': 1.0}
    """
    values_by_name: dict[str, list[float]] = {}
    for table in summary["tables"]:
        arms = {arm["role"]: arm for arm in reversed(table["arms"])}
        for role in ("strict", "rule"):
            values_by_name.setdefault(f"{role} speed", []).append(arms[role]["speedup"])
            values_by_name.setdefault(f"{role} tau", []).append(arms[role]["tau"])
        recovered = arms["rule"]["recovered"]
        # A likelihood above that of the target's own samples is not an improvement.
        if recovered is not None and math.isfinite(recovered) and table.get("metric") != "likelihood":
            values_by_name.setdefault("recovered", []).append(recovered)
    return {name: fmean(values) for name, values in values_by_name.items()}


def table(recipe: Recipe, output: Path) -> str:
    """Return a Markdown table of the published figures and of those measured in a run's folder."""
    figures = measured(json.loads((output / PARTS[0] / "summary.json").read_text(encoding="utf-8")))
    lines = [
        f"# {recipe.name}: {recipe.about}",
        "",
        "| strict -> relaxed | measured | published |",
        "|---|---|---|",
    ]
    for word, unit in (("speed", "x"), ("tau", "")):
        was = recipe.published.get(word)
        pairs = (figures[f"strict {word}"], figures[f"rule {word}"]), was
        cells = ["-" if pair is None else f"{pair[0]:.2f}{unit} -> {pair[1]:.2f}{unit}" for pair in pairs]
        lines.append(f"| {word} | {' | '.join(cells)} |")
    score_kept = f"{figures['recovered']:.1%}" if "recovered" in figures else "not scored"
    lines += [f"| score kept | {score_kept} | - |", ""]
    if recipe.published:
        lines += [f"Published: {recipe.source}. Means over the tasks.", ""]
    return "\n".join(lines)
