"""Refuse flags that would have no effect: a flag that is silently ignored is a wrong result."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mars_jax import assets
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.settings import FILTERS, DynamicTree
from mars_jax.core.errors import MarsError

_PATHS = "model:PATH, eagle:PATH or medusa:PATH"
_DRAFT = f"draft with ngram, {_PATHS}"
_WEIGHTS = ("model", "eagle", "medusa")  # drafters that have a distribution


class Plan(NamedTuple):
    """What the flags say about the rule and the drafter."""

    draft: str  # none, ngram, model, eagle or medusa
    verify: str  # exact, rejection, mars or simulated
    samples_draft: bool  # draw the draft from its distribution, and hand the rule its true q
    streams: bool
    measures_speedup: bool  # decode once more autoregressively, for a line of the statistics


def check_flags(args: argparse.Namespace, rows: Sequence[PromptRow]) -> Plan:
    """Resolve the defaults that depend on other flags.

    Raises:
      MarsError: a flag was given that does not apply to what the others choose, with the cure.
    """
    draft = _draft_kind(args.draft)
    verify = args.verify or ("exact" if draft == "none" else "mars")
    rejects = "rejection" in (verify, args.base)

    def refuse(flag: str, given: Any, why: str) -> None:
        if given is not None and given is not False:
            raise MarsError(f"{flag} does not apply {why}.")

    if args.mesh is None:
        why = "without --mesh, over which several processes divide the work: add it"
        for name in ("coordinator", "num_processes", "process_id"):
            refuse(_flag(name), getattr(args, name), why)
    if args.compare:
        own = "with --compare, which runs the rules itself and prints one table: leave it out"
        for flag in ("verify", "tau", "base", "block", "output", "resume", "speedup"):
            refuse(f"--{flag}", getattr(args, flag), own)
        refuse("--stream" if args.stream else "--no-stream", None if args.stream is None else True, own)
        if draft == "none":
            raise MarsError(f"--compare does not apply to --draft none, which it runs anyway: {_DRAFT}.")
        verify = "mars"
    if draft == "none" and verify != "exact":
        raise MarsError(
            f"--verify {verify} does not apply to --draft none, which proposes nothing: leave it out, or "
            f"{_DRAFT}."
        )
    _check_tau(args, draft, verify)
    if verify != "mars":
        why = f"to {verify} verification, which relaxes nothing: leave it out, or verify a draft with mars"
        for name in ("base", "theta", "margin", "max_relaxed_run"):
            refuse(_flag(name), getattr(args, name), why)
        for row in rows:
            for name in ("theta", "max_relaxed_run"):
                if name in row.settings:
                    raise row.error(f"{name} does not apply {why}.")
    if not rejects:
        refuse(
            "--block", args.block, "without rejection: add --verify rejection, or mars with --base rejection"
        )
    if draft == "none":
        refuse("--num-draft-tokens", args.num_draft_tokens, f"to --draft none: leave it out, or {_DRAFT}")
    if draft not in _WEIGHTS:
        why = f"to --draft {draft}, which drafts no trees: leave it out, or draft with {_PATHS}"
        refuse("--tree", args.tree, why)
        why = f"to --draft {draft}, which has no entropy to stop by: leave it out, or draft with {_PATHS}"
        refuse("--draft-stop", args.draft_stop, why)
        for row in rows:
            if "draft_stop" in row.settings:
                raise row.error(f"draft_stop does not apply {why}.")
    if args.tree is not None:
        why = "with --tree, whose depth is its own: leave one of them out"
        refuse("--num-draft-tokens", args.num_draft_tokens, why)
        dynamic = isinstance(args.tree, DynamicTree)
        if dynamic and draft == "medusa":
            raise MarsError(
                "--tree dynamic does not apply to --draft medusa:PATH: give the children per node at each depth, such "
                "as 4-2-2-1."
            )
        if rejects and (dynamic or max(args.tree) > 1):
            raise MarsError(
                "--tree does not apply to rejection, which verifies chains: use exact, or mars over exact."
            )
    _check_sampling(args, rows)
    _check_theta(args, rows)
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
    if args.chat:
        for row in rows:
            if row.prompt is None:
                raise row.error("--chat does not apply to prompt_tokens: leave it out, or give a text.")
    shows_text = not (args.json or args.output or args.compare)
    own = args.target in assets.MODELS
    return Plan(
        draft=draft,
        verify=verify,
        samples_draft=rejects and draft in _WEIGHTS,
        streams=args.stream is not False and shows_text,
        measures_speedup=args.speedup if args.speedup is not None else own and shows_text and draft != "none",
    )


def _check_sampling(args: argparse.Namespace, rows: Sequence[PromptRow]) -> None:
    default = args.temperature or 0.0
    temperatures = [row.settings.get("temperature", default) for row in rows]
    if not any(temperatures):
        for name, off in FILTERS.items():
            if getattr(args, name) not in (None, off):
                raise MarsError(
                    f"{_flag(name)} does not apply at temperature 0, which takes the best token: leave it "
                    "out, or add a --temperature above 0."
                )
    for row, temperature in zip(rows, temperatures, strict=True):
        for name, off in FILTERS.items():
            if not temperature and row.settings.get(name, off) != off:
                raise row.error(
                    f"{name} does not apply at temperature 0: leave it out, or give a temperature above 0."
                )


def _check_tau(args: argparse.Namespace, draft: str, verify: str) -> None:
    """Simulated acceptance needs a tau, and drafts that can reach it."""
    if verify != "simulated":
        if args.tau is not None:
            raise MarsError("--tau does not apply without --verify simulated: leave it out, or add that.")
        return
    if args.tau is None:
        raise MarsError("--verify simulated needs a --tau: give the tokens per target forward to simulate.")
    if draft not in _WEIGHTS:
        raise MarsError(
            f"--verify simulated does not apply to --draft {draft}, which often drafts nothing: draft with {_PATHS}."
        )
    if args.draft_stop is not None:
        raise MarsError(
            "--draft-stop does not apply to --verify simulated, whose drafts must be long enough: leave it out."
        )


def _check_theta(args: argparse.Namespace, rows: Sequence[PromptRow]) -> None:
    """A ratio is never above 1, so a threshold above 1 is a mistake, or strictness said badly."""
    margin = args.margin or "ratio"
    expected = f"a number above 0 and at most 1 for the margin {margin}, or inf, which is strict"

    def wrong(theta: float | None) -> bool:
        return margin != "gap" and theta is not None and 1 < theta < math.inf

    if wrong(args.theta):
        raise MarsError(f"--theta is {args.theta:g}: expected {expected}.")
    for row in rows:
        if args.theta_file is not None and "temperature" in row.settings and "theta" not in row.settings:
            try:
                args.theta_file.check({"temperature": row.settings["temperature"]})
            except MarsError as error:
                raise row.error(error) from None
        if wrong(row.settings.get("theta")):
            raise row.error(f"theta is {row.settings['theta']:g}: expected {expected}.")


def _draft_kind(spec: str) -> str:
    kind, colon, path = spec.partition(":")
    if (kind in ("none", "ngram") and not colon) or (kind in _WEIGHTS and path):
        return kind
    raise MarsError(f"--draft is {spec}: expected none, ngram, {_PATHS}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
