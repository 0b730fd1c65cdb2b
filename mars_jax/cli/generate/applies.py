"""Refuse flags that would have no effect: a flag that is silently ignored is a wrong result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from mars_jax import assets, specs
from mars_jax.cli.flags import check_host_flags, check_size_flags
from mars_jax.cli.generate.prompts import CONSTRAINTS, SPANS, PromptRow
from mars_jax.core.errors import MarsError
from mars_jax.specs import RuleChoice

_DRAFT = f"draft with {specs.draft_words(name for name in specs.DRAFTERS if name != 'none')}"


class Choices(NamedTuple):
    """What the flags say about the rule and the drafter."""

    draft: specs.DraftSpec
    rule: RuleChoice
    samples_draft: bool  # draw the draft from its distribution, and hand the rule its true q
    streams: bool
    measures_speedup: bool  # decode once more autoregressively, for a line of the statistics


def check_flags(args: argparse.Namespace, rows: Sequence[PromptRow]) -> Choices:
    """Resolve the defaults that depend on other flags.

    Raises:
      MarsError: a flag was given that does not apply to what the others choose, with the cure.
    """
    spec = specs.parse_draft(args.draft, shown="--draft")
    draft, row, rule = spec.kind, spec.row, args.rule

    def refuse(flag: str, given: Any, why: str) -> None:
        if given is not None and given is not False:
            raise MarsError(f"{flag} does not apply {why}.")

    check_host_flags(args)
    if args.compare:
        own = "with --compare, which runs exact itself and prints one table: leave it out"
        refuse(
            "--verify", (rule.row.lossless and args.verify) or None, f"{own}, or name a rule that is lossy"
        )
        for flag in ("base", "block", "output", "resume", "speedup"):
            refuse(f"--{flag}", getattr(args, flag), own)
        refuse("--stream" if args.stream else "--no-stream", None if args.stream is None else True, own)
        if draft == "none":
            raise MarsError(f"--compare does not apply to --draft none, which it runs anyway: {_DRAFT}.")
    if draft == "none" and "draft" in rule.needs:
        raise MarsError(
            f"--verify {rule.row.name} does not apply to --draft none, which proposes nothing: leave it out, or "
            f"{_DRAFT}."
        )
    _check_rule(args, spec, rows)
    _check_refine(args, spec)
    check_size_flags(args, rule)
    if draft == "none":
        refuse("--num-draft-tokens", args.num_draft_tokens, f"to --draft none: leave it out, or {_DRAFT}")
    if not row.trees:
        paths = specs.drafters_that("trees")
        why = f"to --draft {draft}, which drafts no trees: leave it out, or draft with {paths}"
        refuse("--tree", args.tree, why)
    if not row.stops:
        paths = specs.drafters_that("stops")
        why = f"to --draft {draft}, which has no entropy to stop by: leave it out, or draft with {paths}"
        refuse("--draft-stop", args.draft_stop, why)
        for prompt in rows:
            if "draft_stop" in prompt.settings:
                raise prompt.error(f"draft_stop does not apply {why}.")
    if args.tree is not None:
        why = "with --tree, whose depth is its own: leave one of them out"
        refuse("--num-draft-tokens", args.num_draft_tokens, why)
        branching = args.tree if isinstance(args.tree, tuple) else ()
        dynamic = not branching
        if dynamic and not row.dynamic:
            raise MarsError(
                f"--tree dynamic does not apply to --draft {row.spec}: give the children per node at each depth, such "
                "as 4-2-2-1."
            )
        if "chain" in rule.needs and (dynamic or max(branching) > 1):
            block = " by blocks" if rule.settings.get("block") else ""
            raise MarsError(
                f"--tree does not apply to the rule {rule.name}{block}, which verifies chains: use exact or rejection, "
                "or mars over either."
            )
    if args.draft_device is not None:
        _check_draft_device(args, spec, rows)
    _check_sampling(args, rows)
    _check_file(args, rows)
    if args.log_probs and not (args.json or args.output):
        raise MarsError(
            "--log-probs does not apply without --json or --output, whose rows it adds to: add one."
        )
    if args.resume and args.output is None:
        raise MarsError("--resume does not apply without --output: name the file to continue.")
    if args.stream and (args.json or args.output):
        other = "--json" if args.json else "--output"
        raise MarsError(f"--stream does not apply with {other}, which writes finished rows: leave one out.")
    if args.speedup:
        why = "to --draft none, which is autoregression: leave it out, or " + _DRAFT
        refuse("--speedup", draft == "none" or None, why)
        why = (
            "with --json or --output, which print no statistics of their own: leave it out, or use --compare"
        )
        refuse("--speedup", args.json or args.output, why)
    if not args.chat and not any(row.messages for row in rows):
        why = "without a chat template: add --chat, or give messages in a prompts file"
        refuse("--system", args.system, why)
        refuse("--template-arg", args.template_args, why)
    if args.chat:
        for prompt in rows:
            if prompt.tokens is not None:
                raise prompt.error("--chat does not apply to prompt_tokens: leave it out, or give a text.")
    shows_text = not (args.json or args.output or args.compare)
    own = args.target in assets.MODELS
    return Choices(
        draft=spec,
        rule=rule,
        samples_draft="q" in rule.needs and row.samples,
        streams=args.stream is not False and shows_text and args.refine is None,
        measures_speedup=args.speedup if args.speedup is not None else own and shows_text and draft != "none",
    )


def check_asked(args: argparse.Namespace) -> None:
    """What has no meaning where prompts are asked for one by one, on a terminal.

    Raises:
      MarsError: such a flag was given.
    """
    given = {
        "--json": args.json,
        "--output": args.output,
        "--compare": args.compare,
        "--speedup": args.speedup,
        "--no-stream": args.stream is False,
        "--samples": args.samples,
        "--batch-size": args.batch_size,
        "--refine": args.refine,
        "--draft-device": args.draft_device,
        "--num-processes": args.num_processes,
        "--coordinator": args.coordinator,
    }
    for flag, value in given.items():
        if value:
            raise MarsError(
                f"{flag} does not apply without prompts, which are then asked for one by one: leave it out, or give "
                "prompts."
            )


def _check_draft_device(args: argparse.Namespace, draft: specs.DraftSpec, rows: Sequence[PromptRow]) -> None:
    """What drafts ahead is a chain that a small model takes for sure, and that nothing steers."""

    def refuse(why: str) -> None:
        raise MarsError(f"--draft-device does not apply {why}.")

    if draft.kind != "model":
        small = f"{specs.DRAFTERS['model'].spec}, which reads nothing of the target"
        refuse(f"to --draft {draft.kind}: leave it out, or draft with {small}")
    if args.tree is not None:
        refuse("with --tree: leave one of them out, since only a chain can be guessed to hold")
    if "q" in args.rule.needs:
        why = f"to --verify {args.rule.name}, which needs the draft's true probabilities"
        refuse(f"{why}: verify with exact, or mars over it")
    for flag, given in (
        ("--compare", args.compare),
        ("--draft-size", args.draft_size not in (None, "fixed")),
        ("--refine", args.refine is not None),
    ):
        if given:
            refuse(f"with {flag}: leave one of them out")
    if args.coordinator is not None or args.num_processes is not None:
        refuse("to several processes: leave it out, or start one")
    if any(getattr(args, name, None) is not None for name in CONSTRAINTS) or any(
        set(CONSTRAINTS) & set(row.settings) for row in rows
    ):
        refuse("where a text is constrained, of which the draft would not know: leave one of them out")


def _check_refine(args: argparse.Namespace, draft: specs.DraftSpec) -> None:
    """A draft that learns as it decodes."""
    if args.refine is None:
        if args.refine_every is not None:
            raise MarsError("--refine-every does not apply without --refine: add it, or leave this out.")
        return
    if draft.kind not in specs.REFINED:
        raise MarsError(
            f"--refine does not apply to --draft {draft.kind}: draft with {specs.draft_words(specs.REFINED)}, "
            "which learn from their failures."
        )
    for flag, given in (
        ("--mesh", args.mesh),
        ("--compare", args.compare or None),
        ("--stream", args.stream),
    ):
        if given:
            raise MarsError(f"--refine does not apply with {flag}: leave one of them out.")
    if args.resume:
        raise MarsError(
            "--refine does not apply with --resume: what the draft had learned is gone. Leave one of them out."
        )
    rule = args.rule
    if not rule.row.lossless and not args.any_rule:
        raise MarsError(
            f"--refine does not apply to the rule {rule.name}, which is lossy, so that a text would depend on what was "
            "decoded before it: add --verify exact or rejection, or --any-rule."
        )


def _check_sampling(args: argparse.Namespace, rows: Sequence[PromptRow]) -> None:
    default = args.temperature or 0.0
    temperatures = [row.settings.get("temperature", default) for row in rows]
    if (args.samples or 1) > 1:
        if not all(temperatures):
            raise MarsError(
                "--samples does not apply at temperature 0, where all are the same: leave it out, or give every "
                "prompt a temperature above 0."
            )
        for row in rows:
            if "seed" in row.settings:
                raise row.error("seed does not apply with --samples, which all have their own: leave it out.")
    if not any(temperatures):
        for name in specs.FILTERS:
            if getattr(args, name) not in (None, specs.REQUEST[name].default):
                raise MarsError(
                    f"{_flag(name)} does not apply at temperature 0, which takes the best token: leave it "
                    "out, or add a --temperature above 0."
                )
    for row, temperature in zip(rows, temperatures, strict=True):
        for name in specs.FILTERS:
            off = specs.REQUEST[name].default
            if not temperature and row.settings.get(name, off) != off:
                raise row.error(
                    f"{name} does not apply at temperature 0: leave it out, or give a temperature above 0."
                )


def _check_rule(args: argparse.Namespace, draft: specs.DraftSpec, rows: Sequence[PromptRow]) -> None:
    """What the rule needs, and what it does not read."""
    rule = args.rule
    for name, setting in rule.options.items():
        required = setting.default is None and not setting.optional and name not in rule.settings
        # What every row chooses for itself need not be given for all.
        if required and not (rows and all(name in row.numbers for row in rows)):
            flag = _flag(name) if setting.flag else f"--rule-option {name}=VALUE"
            raise MarsError(f"--verify {rule.row.name} needs a {flag}: give {setting.expected()}.")
    if "long" in rule.needs:
        if not draft.row.stops:
            raise MarsError(
                f"--verify {rule.row.name} does not apply to --draft {draft.kind}, which often drafts nothing: draft "
                f"with {specs.drafters_that('stops')}."
            )
        why = f"does not apply to --verify {rule.row.name}, whose drafts must be long enough: leave it out."
        if args.draft_stop is not None:
            raise MarsError(f"--draft-stop {why}")
        for row in rows:
            if "draft_stop" in row.settings:
                raise row.error(f"draft_stop {why}")
    constrained = any(getattr(args, name, None) is not None for name in CONSTRAINTS)
    if (
        args.relax_constrained
        and not constrained
        and not any(set(CONSTRAINTS) & set(r.settings) for r in rows)
    ):
        raise MarsError(
            "--relax-constrained does not apply where no text is constrained: leave it out, or add --regex, "
            "--json-schema or --choice."
        )
    if rule.row.lossless:
        why = f"does not apply to the rule {rule.name}, which relaxes nothing: leave it out."
        for name in ("relax_constrained", *SPANS):
            if getattr(args, name, None):
                raise MarsError(f"{_flag(name)} {why}")
            for row in rows:
                if row.settings.get(name):
                    raise row.error(f"{name} {why}")
        for row in rows:
            if row.settings.get("strict"):
                raise row.error(
                    f"strict does not apply to the rule {rule.name}, which relaxes nothing: leave it out, or verify "
                    "with a rule that is lossy."
                )


def _check_file(args: argparse.Namespace, rows: Sequence[PromptRow]) -> None:
    """A calibrated threshold stands for the settings that it was calibrated with, in every row that takes it."""
    if args.theta_file is None:
        return
    for row in rows:
        if "theta" in row.numbers:
            continue
        try:
            if "temperature" in row.settings:
                args.theta_file.check({"temperature": row.settings["temperature"]})
            args.theta_file.check_settings(row.numbers)
        except MarsError as error:
            raise row.error(error) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
