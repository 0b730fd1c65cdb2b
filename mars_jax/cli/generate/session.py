"""From flags to what the API takes: requests, target, drafter and rule. The cheap checks come first."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from mars_jax import activity, drafters, pretrained, verify
from mars_jax.cli.generate.applies import Plan
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.open_target import open_target
from mars_jax.cli.progress import Pace
from mars_jax.cli.settings import PER_REQUEST, DynamicTree
from mars_jax.core.errors import MarsError
from mars_jax.hub.files import resolve
from mars_jax.pretrained import Pretrained, check_same_vocabulary
from mars_jax.serve import prepare as batch
from mars_jax.serve import requests as request
from mars_jax.serve.generate import compile_batch, generate_stream, run_batch
from mars_jax.serve.requests import Completion, Request, StreamEvent

CHUNK = 2048
"""Prompts that are tokenized at once: enough for all cores, and few enough to tell how far it is."""

Rule = verify.Exact | verify.Rejection | verify.Mars | verify.Simulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Everything a run needs."""

    target: Pretrained
    drafter: drafters.LoadedDrafter
    rule: Rule
    requests: list[Request]
    batch_size: int
    drafts: bool  # whether anything is proposed at all
    _compiled: set[int] = dataclasses.field(default_factory=set)

    def batches(self) -> Iterator[list[Request]]:
        """The requests, a batch at a time."""
        return request.batches(self.requests, self.batch_size)

    def run(self, group: list[Request]) -> list[Completion]:
        """Decode one batch; its time holds no compilation."""
        self._compile(group, stream=False)
        return run_batch(self.target, self.drafter, group, verify=self.rule, rows=self.batch_size)

    def stream(self, group: list[Request]) -> Iterator[StreamEvent]:
        """Decode one batch step by step; its time holds no compilation."""
        self._compile(group, stream=True)
        return generate_stream(self.target, self.drafter, group, verify=self.rule, rows=self.batch_size)

    @functools.cached_property
    def autoregressive(self) -> Session:
        """The same prompts without a draft."""
        drafter = drafters.load("none", self.target)
        return dataclasses.replace(self, drafter=drafter, rule=verify.exact(), drafts=False, _compiled=set())

    def _compile(self, group: list[Request], *, stream: bool) -> None:
        width = batch.buffer_width(self.target, group)  # what shapes of two batches can differ in
        if width not in self._compiled:
            rows = self.batch_size
            compile_batch(self.target, self.drafter, group, verify=self.rule, rows=rows, stream=stream)
            self._compiled.add(width)


def open_session(args: argparse.Namespace, plan: Plan, rows: Sequence[PromptRow]) -> Session:
    """Check prompts and vocabularies on configs and tokenizers alone, and only then load weights.

    Raises:
      MarsError: anything wrong with the checkpoints or the prompts.
    """
    sketch = pretrained.outline(args.target)
    requests = make_requests(sketch, args, rows)
    path = args.draft.partition(":")[2]
    if plan.draft == "model":
        check_same_vocabulary(sketch, pretrained.outline(path))
    elif path:
        resolve(path, weights=False)
    if not sketch.has_tokenizer and not (args.json or args.output or args.compare):
        raise MarsError(f"'{args.target}' has no tokenizer and so no text to show: add --json for token ids.")
    target = open_target(args, sketch)
    drafter = drafters.load(
        args.draft,
        target,
        num_draft_tokens=args.num_draft_tokens,
        tree=drafters.Dynamic(*args.tree) if isinstance(args.tree, DynamicTree) else args.tree,
        sample=plan.samples_draft,
        dtype=args.dtype,
    )
    if plan.verify == "simulated" and args.tau > drafter.drafter.max_depth + 1:
        raise MarsError(
            f"--tau is {args.tau:g}, and this draft gives {drafter.drafter.max_depth + 1} tokens a step at most: "
            "ask for less, or draft deeper."
        )
    size = args.batch_size or (1 if plan.streams else 8)
    return Session(
        target=target,
        drafter=drafter,
        rule=_rule(args, plan),
        requests=requests,
        batch_size=min(size, len(requests)),
        drafts=plan.draft != "none",
    )


def _rule(args: argparse.Namespace, plan: Plan) -> Rule:
    if plan.verify == "simulated":
        return verify.simulated(args.tau)
    rejection = verify.rejection(block=bool(args.block))
    if plan.verify == "mars":
        base = rejection if args.base == "rejection" else verify.exact()
        return verify.mars(base, theta=args.theta or 0.9, margin=args.margin or "ratio")
    return rejection if plan.verify == "rejection" else verify.exact()


def make_requests(target: Pretrained, args: argparse.Namespace, rows: Sequence[PromptRow]) -> list[Request]:
    """Tokenized requests. Row i draws with the seed --seed + i unless it names one, whatever its batch.

    Raises:
      MarsError: a prompt that the model cannot take, by its line.
    """
    common = {name: getattr(args, name) for name in PER_REQUEST if getattr(args, name, None) is not None}
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
