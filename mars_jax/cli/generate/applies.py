"""Defaults of `generate` that depend on several flags, and checks that the tables in `cli.flags` cannot express."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from mars_jax.cli.flags import Present, flag_of
from mars_jax.cli.generate.prompts import CONSTRAINTS, SPANS, PromptRow
from mars_jax.drafters import registry
from mars_jax.drafters.registry import DraftSpec, drafters_that
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import FILTERS, REQUEST
from mars_jax.verify import RuleChoice


class Choices(NamedTuple):
    """Resolved choices: the draft, whether text is streamed, and the draft size."""

    draft: DraftSpec
    streams: bool
    draft_size: str  # "fixed", "auto", or "usual", which is auto on a CPU and fixed elsewhere


def check_flags(args: argparse.Namespace, rows: Sequence[PromptRow]) -> Choices:
    """Check the combination of flags, and resolve the defaults that depend on other flags.

    Raises:
      MarsError: a flag cannot be combined with the others. The message contains the fix.
    """
    draft, rule, present = registry.parse_draft(args.draft, shown="--draft"), args.rule, Present(args, rows)
    present.refuse_alone()
    if args.compare and rule.definition.lossless:
        why = "with --compare, which runs exact itself: leave it out, or name a rule that is lossy"
        present.refuse(["--verify"], why)
    _check_draft(present, draft, rule)
    _check_rule(present, draft, rule, rows)
    present.refuse_for(draft, rule)
    _check_sampling(present, args, rows)
    _check_file(args, rows)
    draft_size = _draft_size(args, draft, rule)
    if args.draft_size == "fixed":
        args.draft_size = None  # rows do not record flags at their defaults
    # A draft that learns needs finished completions, so with --refine the text is not streamed.
    shows_text = not (args.json or args.output or args.compare)
    streams = args.stream is not False and shows_text and args.refine is None
    return Choices(draft, streams, draft_size)


def _draft_size(args: argparse.Namespace, draft: DraftSpec, rule: RuleChoice) -> str:
    """Return --draft-size; its default is "usual" for a default draft that may be resized, otherwise "fixed"."""
    if args.draft_size is not None:
        return args.draft_size
    may_resize = args.draft_is_default and draft.definition.resizes and rule.name == "exact"
    if may_resize and args.tree is None and args.refine is None and args.draft_device is None:
        return "usual"
    return "fixed"


def check_interactive_flags(args: argparse.Namespace) -> None:
    """Raise MarsError for flags that do not apply when prompts are typed at a terminal."""
    flags = ["--json", "--output", "--compare", "--no-stream", "--samples", "--batch-size"]
    flags += ["--refine", "--draft-device", "--num-processes", "--coordinator"]
    why = "without prompts, which are then asked for one by one: leave it out, or give prompts"
    Present(args).refuse(flags, why)


def _check_draft(present: Present, draft: DraftSpec, rule: RuleChoice) -> None:
    """Raise MarsError for flags that do not apply to the drafter."""
    if draft.kind == "none":
        flags = ["--compare", "--num-draft-tokens"]
        if "draft" in rule.needs:
            flags.append(f"--verify {rule.spec}")
        draft_names = registry.draft_words(name for name in registry.definitions() if name != "none")
        present.refuse(
            flags, f"to --draft none, which proposes nothing: leave it out, or draft with {draft_names}"
        )
    if draft.kind != "model":
        small = f"{registry.definition('model').spec}, which needs no states of the target"
        present.refuse(["--draft-device"], f"to --draft {draft.kind}: leave it out, or draft with {small}")
    if any(name in present for name in CONSTRAINTS):
        why = "with constrained text, because the draft ignores constraints: leave one of them out"
        present.refuse(["--draft-device"], why)


def _check_rule(present: Present, draft: DraftSpec, rule: RuleChoice, rows: Sequence[PromptRow]) -> None:
    """Raise MarsError for flags that do not apply to the rule, and for missing settings."""
    if "long" in rule.needs:
        verify_flag = f"--verify {rule.definition.name}"
        if not draft.definition.stops:
            why = f"which often drafts nothing: draft with {drafters_that('stops')}"
            raise MarsError(f"{verify_flag} does not apply to --draft {draft.kind}, {why}.")
        why = f"to {verify_flag}, whose drafts must be long enough: leave it out"
        present.refuse(["--draft-stop", "draft_stop"], why)
    if "q" in rule.needs:
        why = f"to --verify {rule.name}, which needs the draft's true probabilities: verify with exact, or mars over it"
        present.refuse(["--draft-device"], why)
    if rule.definition.lossless:
        relax_names = [name for key in ("relax_constrained", *SPANS) for name in (flag_of(key), key)]
        cure = "leave it out, or verify with a rule that is lossy"
        present.refuse([*relax_names, "strict"], f"to the rule {rule.name}, which relaxes nothing: {cure}")
    elif "--any-rule" not in present:
        lossy_reason = "which is lossy, so that a text would depend on what was decoded before it"
        cure = "add --verify exact or rejection, or --any-rule"
        present.refuse(["--refine"], f"to the rule {rule.name}, {lossy_reason}: {cure}")
    for name, setting in rule.options.items():
        is_required = setting.default is None and not setting.optional and name not in rule.settings
        # A setting that every row provides needs no flag.
        if is_required and not (rows and all(name in row.numbers for row in rows)):
            flag = flag_of(name) if setting.flag else f"--rule-option {name}=VALUE"
            raise MarsError(f"--verify {rule.definition.name} needs a {flag}: give {setting.expected()}.")


def _check_sampling(present: Present, args: argparse.Namespace, rows: Sequence[PromptRow]) -> None:
    temperatures = [row.settings.get("temperature", args.temperature or 0.0) for row in rows]
    if (args.samples or 1) > 1:
        if not all(temperatures):
            cure = "leave it out, or give every prompt a temperature above 0"
            present.refuse(["--samples"], f"at temperature 0, where all are the same: {cure}")
        present.refuse(["seed"], "with --samples, which all have their own: leave it out")
    # A filter at its default is off at every temperature, so do not refuse it.
    defaults = {name: REQUEST[name].default for name in FILTERS}
    why = "at temperature 0, which takes the best token: leave it out, or give a temperature above 0"
    if not any(temperatures):
        present.refuse([flag_of(name) for name in FILTERS if getattr(args, name) != defaults[name]], why)
    for row, temperature in zip(rows, temperatures, strict=True):
        for name, default in defaults.items():
            if not temperature and row.settings.get(name, default) != default:
                raise row.error(f"{name} does not apply {why}.")


def _check_file(args: argparse.Namespace, rows: Sequence[PromptRow]) -> None:
    """Check that a run with a calibrated threshold uses the settings of the calibration."""
    if args.theta_file is None:
        return
    # Leave out the temperature, which a prompt may set. The loop below compares it for each prompt.
    args.theta_file.check({name: value for name, value in vars(args).items() if name != "temperature"})
    for row in rows:
        # A prompt with its own theta does not use the calibrated one.
        if "theta" in row.numbers:
            continue
        try:
            args.theta_file.check({"temperature": row.settings.get("temperature", args.temperature or 0.0)})
            args.theta_file.check_settings(row.numbers)
        except MarsError as error:
            raise row.error(error) from None
