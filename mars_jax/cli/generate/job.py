"""From flags to what the API takes: requests, and a session to decode them. The cheap checks come first."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from mars_jax import drafters, hub, specs, verify
from mars_jax.cli.generate.applies import Choices
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.open_target import open_target
from mars_jax.cli.progress import Pace
from mars_jax.core import activity
from mars_jax.core.errors import MarsError
from mars_jax.core.types import LoadedRule
from mars_jax.hub.files import resolve
from mars_jax.pretrained import Pretrained, check_same_vocabulary
from mars_jax.serve import requests as request
from mars_jax.serve.generate import check_finite
from mars_jax.serve.requests import Completion, Request, StreamEvent
from mars_jax.serve.session import Batch, Session

CHUNK = 2048
"""Prompts that are tokenized at once: enough for all cores, and few enough to tell how far it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The prompts of a command, and the session that decodes them."""

    session: Session
    requests: list[Request]
    drafts: bool  # whether anything is proposed at all
    simulated: bool = False  # the text means nothing
    finished: list[Completion] = dataclasses.field(default_factory=list)

    def batches(self) -> Iterator[Batch]:
        """The requests, a batch at a time."""
        return self.session.batches(self.requests)

    def run(self, batch: Batch) -> list[Completion]:
        """Decode one batch; its time holds no compilation."""
        done = batch.session.run(batch.requests)
        self.finished.extend(done)
        return done

    def stream(self, batch: Batch) -> Iterator[StreamEvent]:
        """Decode one batch step by step; its time holds no compilation."""
        return self._noted(batch.session.stream(batch.requests))

    def _noted(self, events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
        for event in events:
            if event.completion is not None:
                self.finished.append(event.completion)
            yield event

    def check_finite(self) -> None:
        """Raise MarsError where prompts failed; their rows are written by then."""
        check_finite(self.session.target, self.finished)

    @functools.cached_property
    def autoregressive(self) -> Job:
        """The same prompts without a draft."""
        return Job(session=self.session.autoregressive, requests=self.requests, drafts=False)


def open_job(args: argparse.Namespace, choices: Choices, rows: Sequence[PromptRow]) -> Job:
    """Check prompts and vocabularies on configs and tokenizers alone, and only then load weights.

    Raises:
      MarsError: anything wrong with the checkpoints, the rule or the prompts.
    """
    sketch = hub.outline(args.target)
    requests = make_requests(sketch, args, rows)
    rule = _rule(choices.rule, sketch, rows)
    kind, path = choices.draft
    if kind == "model":
        check_same_vocabulary(sketch, hub.outline(path))
    elif path:
        resolve(path, weights=False)
    if not sketch.has_tokenizer and not (args.json or args.output or args.compare):
        raise MarsError(f"'{args.target}' has no tokenizer and so no text to show: add --json for token ids.")
    target = open_target(args, sketch)
    if target.mesh is not None:
        rule = _rule(choices.rule, target, rows)  # its weights go where the target's are
    drafter = drafters.load(
        args.draft,
        target,
        num_draft_tokens=args.num_draft_tokens,
        tree=args.tree,
        sample=choices.draft.row.samples and verify.needs_chain(rule.rule),
        dtype=args.dtype,
    )
    simulated = choices.rule.row.name == "simulated"
    if simulated:
        _check_tau(choices.rule, rows, drafter.drafter.max_depth + 1)
    size = args.batch_size or (1 if choices.streams else 8)
    session = Session(
        target=target,
        drafter=drafter,
        rule=rule,
        batch_size=min(size, len(requests)),
        log_probs=args.log_probs,
    )
    return Job(session=session, requests=requests, drafts=kind != "none", simulated=simulated)


def _rule(choice: specs.RuleChoice, target: Pretrained, rows: Sequence[PromptRow]) -> LoadedRule:
    """The rule, the numbers that rows choose for themselves as one for each prompt."""
    chosen = dict.fromkeys(name for row in rows for name in row.numbers)
    common = {name: setting.default for name, setting in choice.options.items()} | dict(choice.settings)
    own = {name: [row.numbers.get(name, common[name]) for row in rows] for name in chosen}
    for name, values in own.items():
        if None in values:
            raise rows[values.index(None)].error(f"it has no {name}, which other rows have: give it one too.")
    return verify.load(choice.spec, target, **{**choice.settings, **own})


def _check_tau(choice: specs.RuleChoice, rows: Sequence[PromptRow], most: int) -> None:
    """A draft gives so many tokens a step at most."""
    for row in rows:
        tau = row.numbers.get("tau") or choice.settings["tau"]
        if tau > most:
            told = f"is {tau:g}, and this draft gives {most} tokens a step at most: ask for less, or draft deeper."
            raise row.error(f"tau {told}") if "tau" in row.numbers else MarsError(f"--tau {told}")


def make_requests(target: Pretrained, args: argparse.Namespace, rows: Sequence[PromptRow]) -> list[Request]:
    """Tokenized requests. Row i draws with the seed --seed + i unless it names one, whatever its batch.

    All of them before weights are loaded, and not as they are decoded: a prompt that is too long is to be named in the
    first seconds, and not after hours of work.

    Raises:
      MarsError: a prompt that the model cannot take, by its line.
    """
    names = [name for name, setting in specs.REQUEST.items() if setting.per_row]
    common = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    requests = []
    for index, (row, tokens) in enumerate(zip(rows, _tokens(target, rows, chat=args.chat), strict=True)):
        settings = common | {"seed": ((args.seed or 0) + index) % 2**32} | row.settings
        try:
            [made] = request.make_requests(target, [tokens], ignore_eos=args.ignore_eos, **settings)
            request.check_request(target, made)
        except MarsError as error:
            raise row.error(error) from None
        requests.append(dataclasses.replace(made, prompt=row.prompt, id=row.id))
    return requests


def _tokens(target: Pretrained, rows: Sequence[PromptRow], *, chat: bool) -> Iterator[Sequence[int]]:
    """Token ids of each prompt, a chunk at a time, each chunk on all cores.

    Raises:
      MarsError: a prompt that cannot be tokenized, by its line.
    """
    with activity.doing("tokenizing") as going:
        pace = Pace(len(rows))
        for first in range(0, len(rows), CHUNK):
            chunk = rows[first : first + CHUNK]
            texts = [row.prompt for row in chunk if row.prompt is not None]
            try:
                found = iter(target.encode_many(texts, chat=chat) if texts else ())
            except MarsError:
                found = None  # one of them is at fault, and is to be named
            for row in chunk:
                yield row.tokens or () if row.prompt is None else _one(target, row, found, chat=chat)
            pace.advance(first + len(chunk))
            going.detail = f"{pace.describe()} prompts"


def _one(target: Pretrained, row: PromptRow, found: Iterator[list[int]] | None, *, chat: bool) -> list[int]:
    if found is not None:
        return next(found)
    assert row.prompt is not None
    try:
        return target.encode(row.prompt, chat=chat)
    except MarsError as error:
        raise row.error(error) from None
