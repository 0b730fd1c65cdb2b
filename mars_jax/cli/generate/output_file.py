"""The rows of `generate`: their content, and the settings that determine them."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence

import jax

from mars_jax.cli.flags import SAMPLING
from mars_jax.cli.generate.applies import Choices
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.rule_flags import FLAGS
from mars_jax.drafters.registry import DraftSpec
from mars_jax.hub.files import resolve
from mars_jax.serve.requests import Completion, Request, TokenLogProbs
from mars_jax.serve.rows import RowFile, digest, fingerprint, plain, to_line
from mars_jax.serve.session import Session
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import REQUEST
from mars_jax.utils.types import JsonObject
from mars_jax.verify import is_own, source_digest

_ELSEWHERE = {
    # The digest of the prompts covers these flags.
    "prompts", "prompts_file",
    "output", "resume", "json", "stream", "compare", "part",
    # This flag only allows adaptive draft length, which changes no token.
    "draft_is_default",
    # A row's tokens do not depend on its batch or on the number of devices.
    "batch_size", "prefill_chunk", "mesh", "draft_device", "coordinator", "num_processes", "process_id",
    # This flag controls whether checksums are compared, not which weights are loaded.
    "no_check",
    # The rule's settings record these flags.
    "theta_file", "rule", "rule_option", *FLAGS,
}  # fmt: skip
"""Flags that do not change rows. All others are recorded, including flags that are added later."""
_DEFAULTS = {name: row.default for name, row in REQUEST.items()}


def recorded(args: argparse.Namespace, choices: Choices, rows: Sequence[PromptRow]) -> JsonObject:
    """Return the settings of a run, as JSON values. Settings at their defaults are left out.

    Args:
      args: the flags.
      choices: the resolved defaults of the flags.
      rows: the prompts of the whole run, including all parts.
    """
    settings = {
        name: plain(value)
        for name, value in vars(args).items()
        if name not in _ELSEWHERE and not _is_default(name, value)
    }
    rule = choices.rule
    settings["verify"] = rule.spec
    if is_own(rule.spec):
        settings["rule_source"] = source_digest(rule.spec)
    for name, value in rule.settings.items():
        if value != rule.options[name].default:
            settings[name] = plain(value)
    # Leave out the origin of each prompt, so that a run can continue after its prompts file was moved.
    prompts = [dataclasses.astuple(dataclasses.replace(row, where="")) for row in rows]
    return settings | {"prompts": digest(repr(prompts).encode())}


def _is_default(name: str, value: object) -> bool:
    # Compare by identity: 0 equals False, but is a setting.
    return value is None or value is False or (name in _DEFAULTS and value == _DEFAULTS[name])


def to_row(completion: Completion, rule: str, run: JsonObject) -> JsonObject:
    """Return the row of a finished prompt; docs/rows.md has its schema.

    Args:
      completion: completion of the prompt.
      rule: name of the rule in reports.
      run: settings that distinguish the row from those of other runs, from `Job.run_of`.
    """
    request, metrics = completion.request, completion.metrics
    row = {
        "id": request.id,
        "prompt": request.prompt,
        "messages": request.messages,
        "text": completion.text,
        "prompt_tokens": request.prompt_tokens,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "steps": metrics.steps,
        "tau": metrics.tau,
        "proposed": metrics.proposed,
        "accepted_exact": metrics.accepted_exact,
        "accepted_relaxed": metrics.accepted_relaxed,
        "depth_histogram": metrics.depth_histogram,
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
        "rule": rule,
        "sampling": sampling(request),
        "run": run,
        "log_probs": completion.log_probs and _columns(completion.log_probs),
    }
    # A prompt of token ids keeps its key, with null.
    return {name: value for name, value in row.items() if value is not None or name == "prompt"}


def _columns(log_probs: TokenLogProbs) -> JsonObject:
    columns = log_probs._asdict()
    if not log_probs.top:  # no --top-log-probs
        del columns["top"], columns["processed_top"]
    return columns


def sampling(request: Request) -> JsonObject:
    """Return the settings of a request that its row records; docs/rows.md has their schema."""
    return {name: getattr(request, name) for name in (*SAMPLING, "strict")}


def missing_rows(file: RowFile, requests: Sequence[Request]) -> list[int]:
    """Return the numbers of the requests without a row on file. The rows may be in any order.

    Raises:
      MarsError: the file repeats a row, or contains a row of a different part of the run.
    """
    numbers_by_key: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        # Compare rows in the form of JSON, which is how the file stores them.
        row_key = to_line(
            {"id": request.id, "prompt_tokens": request.prompt_tokens, "sampling": sampling(request)}
        )
        numbers_by_key.setdefault(row_key, []).append(number)
    for line, row in enumerate(file.rows, start=1):
        row_key = to_line({name: row.get(name) for name in ("id", "prompt_tokens", "sampling")})
        if not numbers_by_key.get(row_key):
            raise MarsError(
                f"line {line} of '{file.path}' repeats another line or belongs to another --part: remove the line, or "
                "choose another --output."
            )
        # Equal requests share a key, and each row on file accounts for one of them.
        numbers_by_key[row_key].pop(0)
    return sorted(itertools.chain.from_iterable(numbers_by_key.values()))


def fingerprints(session: Session, draft: DraftSpec) -> dict[str, str]:
    """Return the fingerprint of every component that has weights. All processes of a mesh must call it.

    Args:
      session: the session, with its weights.
      draft: spec of the drafter.
    """
    target, drafter, rule = session.target, session.drafter, session.loaded_rule
    fingerprint_by_component = {"target": fingerprint(target.params, target.path)}
    if draft.path:
        checkpoints = [resolve(draft.checkpoint, weights=False)] if draft.checkpoint else []
        fingerprint_by_component["draft"] = fingerprint(drafter.params, *checkpoints)
    if jax.tree.leaves(rule.params):
        fingerprint_by_component["rule"] = fingerprint(rule.params)
    return fingerprint_by_component
