"""Flags that all commands share for selecting a rule and its settings, and tables of rules and drafters."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Collection, Mapping
from typing import IO, Any

from mars_jax.cli.flags import add_flags, flag_of
from mars_jax.drafters.registry import definitions
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import Setting
from mars_jax.utils.user_code import load_function
from mars_jax.verify import NEEDS, Given, RuleChoice, choose, find, is_own, rules, split

OWN = "FILE.py:NAME or package.module:NAME"


def add_rule_flags(
    group: argparse._ActionsContainer, *, default: str = "mars", instead: Collection[str] = ()
) -> None:
    """Add --verify, --rule-option, and a flag for each rule setting that has one in the table.

    Args:
      group: a parser, or one of its groups.
      default: default rule, for the help.
      instead: settings that get no flag here, because the command sets them in a different way.
    """
    specs = ", ".join(f"{row.name}:PATH" if "weights" in row.needs else row.name for row in rules().values())
    verify_help = (
        f"{specs} (default: {default}); or a rule of your own, as {OWN}, whose code is run; generate --list-rules "
        "explains them"
    )
    add_flags(group, {"--verify RULE": verify_help})
    for name, settings in _flags().items():
        if name in instead:
            continue
        # All rules with this setting agree on its type, so take the type from the first one.
        flag, help_text, (_, setting) = flag_of(name), _help(name, settings), settings[0]
        if setting.kind is bool:
            group.add_argument(flag, action="store_const", const="true", help=help_text)
        else:
            group.add_argument(flag, metavar="NAME" if setting.choices else setting.metavar, help=help_text)
    option_help = (
        "any setting of the rule; may be given several times; for your own rule, an argument of its function"
    )
    add_flags(group, {"--rule-option NAME=VALUE ...": option_help})


def choose_with_weights(spec: str, given: Mapping[str, Given]) -> RuleChoice:
    """Choose a rule, and check that its weights are given if it needs any.

    Raises:
      MarsError: weights are missing; see also `choose`.
    """
    choice = choose(spec, given)
    if "weights" in choice.definition.needs and not split(spec)[1]:
        name = choice.definition.name
        raise MarsError(f"the rule {name} needs weights: name them, as {name}:PATH.")
    return choice


def rule_and_file(spec: str | None, given: Mapping[str, Given], default: str) -> tuple[RuleChoice, Any]:
    """Return the chosen rule, and the `mars-jax calibrate` file that theta refers to, or None if theta is not a file.

    Args:
      spec: spec of the rule; None selects the file's rule, or else the default.
      given: settings of the rule, from `given_settings`.
      default: spec of the default rule.

    Raises:
      MarsError: see `choose_with_weights` and `lab.theta.rule_of_file`.
    """
    if "theta" in given and not is_number(given["theta"].text):
        # Look up the function by name, because `cli.generate` must not import `lab`.
        return load_function("mars_jax.lab.theta:rule_of_file")(spec, given)
    return choose_with_weights(spec or default, given), None


def is_number(text: str) -> bool:
    """Return whether a string is a number rather than a file name."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def given_settings(args: argparse.Namespace) -> dict[str, Given]:
    """Return the settings of the rule from flags and --rule-option, as strings."""
    settings = {}
    for name in _flags():
        flag_value = getattr(args, name, None)
        if flag_value is not None:
            settings[name] = Given(flag_value, flag_of(name))
    for option in args.rule_option or ():
        name, equals, text = option.partition("=")
        if not (name and equals):
            raise MarsError(f"--rule-option is {option}: expected NAME=VALUE, such as theta=0.8.")
        name = name.replace("-", "_")
        if name in settings:
            earlier_flag = settings[name].shown
            raise MarsError(f"--rule-option {option} is given twice, also as {earlier_flag}: leave one out.")
        settings[name] = Given(text, f"--rule-option {name}")
    return settings


def _flags() -> dict[str, list[tuple[str, Setting]]]:
    """Return the settings that have a flag, keyed by name, each with the rules that use it."""
    by_name: dict[str, list[tuple[str, Setting]]] = {}
    for row in rules().values():
        for name, setting in row.settings.items():
            if setting.flag:
                by_name.setdefault(name, []).append((row.name, setting))
    return by_name


FLAGS = ("verify", *_flags())
"""Names of the parsed arguments that determine the rule."""


def _help(name: str, settings: list[tuple[str, Setting]]) -> str:
    """Return the help text of a setting. Rules for which the setting has the same meaning share one entry."""
    rules_by_text: dict[str, list[str]] = {}
    for rule, setting in settings:
        # The short help ends at the first semicolon, so the choices and the default go before it.
        text, semicolon, details = setting.help.partition("; ")
        if setting.choices:
            text += ": " + ", ".join(f"{choice} ({meaning})" for choice, meaning in setting.choices.items())
        if setting.kind is not bool and setting.default is not None:
            text += f" (default: {setting.default_words})"
        rules_by_text.setdefault(text + semicolon + details, []).append(rule)
    help_text = "; ".join(f"{', '.join(rules)}: {text}" for text, rules in rules_by_text.items())
    if name == "theta":
        help_text += "; or a file that calibrate wrote, which also selects its rule"
    # argparse applies % formatting to help strings.
    return help_text.replace("%", "%%")


def print_rules(out: IO[str], *, as_json: bool, spec: str | None) -> None:
    """Print the table of rules, and the user's rule if `spec` names one."""
    rule_rows = list(rules().values())
    if spec and is_own(spec):
        rule_rows.append(find(spec))
    if as_json:
        print(json.dumps([row.as_json() for row in rule_rows], indent=2), file=out)
        return
    for row in rule_rows:
        kind = "lossless" if row.lossless else "lossy"
        rule_facts = [kind, *(f"needs {NEEDS[need]}" for need in row.needs), row.paper]
        print(f"{row.name}: {row.help}", file=out)
        print(_lines(f"  {'; '.join(filter(None, rule_facts))}"), file=out)
        for setting in row.settings.values():
            print(_lines(f"  {setting.name}: {_described(setting)}"), file=out)
        print(file=out)
    print(f"Name a rule of your own as {OWN}.", file=out)


def _lines(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)


def _described(setting: Setting) -> str:
    """Describe a setting in one line."""
    if isinstance(setting.ranges, Mapping):  # the range depends on another setting
        range_texts = [bounds.words for bounds in setting.ranges.values()]
    else:
        range_texts = [setting.expected()]
    per_row_note = "a prompt may choose its own" if setting.per_row else ""
    description_parts = [setting.help, *range_texts, f"default: {setting.default_words}", per_row_note]
    return "; ".join(filter(None, description_parts))


def print_drafters(out: IO[str], *, as_json: bool) -> None:
    """Print the table of drafters."""
    drafter_rows = definitions().values()
    if as_json:
        print(json.dumps([row.as_json() for row in drafter_rows], indent=2), file=out)
        return
    for row in drafter_rows:
        features = {
            "trees": row.trees,
            "dynamic trees": row.dynamic,
            "rejection with its true q": row.samples,
            "draft_stop": row.stops,
        }
        drafter_facts = [", ".join(name for name, supported in features.items() if supported) or "no trees"]
        if row.grows:
            drafter_facts.append("default: a dynamic tree")
        elif row.length:
            drafter_facts.append(f"default: {row.length} tokens")
        drafter_facts.append(row.paper)
        print(f"{row.spec}: {row.help}\n  {'; '.join(filter(None, drafter_facts))}", file=out)
