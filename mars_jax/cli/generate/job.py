"""The requests and the session of a command, created from its flags. Cheap checks come first."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from mars_jax import hub, verify
from mars_jax.cli.generate.applies import Choices
from mars_jax.cli.generate.prompts import CONSTRAINTS, SPANS, PromptRow
from mars_jax.cli.open_target import check_draft, check_file, open_drafter, open_target
from mars_jax.cli.progress import busy
from mars_jax.hub.pretrained import Pretrained
from mars_jax.models.quantize import Int4, Mxfp4
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.requests import Completion, Request, check_request, make_requests
from mars_jax.serve.rows import plain
from mars_jax.serve.session import Session, check_finite
from mars_jax.utils import activity, hosts
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import DTYPES, REQUEST
from mars_jax.utils.types import JsonObject, PyTree
from mars_jax.utils.user_code import load_function
from mars_jax.utils.version import __version__
from mars_jax.verify import LoadedRule, RuleChoice

T = TypeVar("T")

CHUNK = 2048
"""Number of prompts tokenized at once: enough to use all cores, but few enough to show progress."""
SHORT = 3
"""Default length of a chain on a CPU, where each drafted node costs time and each draft size is compiled separately."""


def in_order(
    numbered: Iterable[tuple[int, T]], order: Iterable[int], *, ends: Callable[[T], bool] = lambda value: True
) -> Iterator[T]:
    """Yield all values with the first number in `order` as they arrive, then those with the second number, and so on.

    `ends` returns whether a value is the last one with its number.

    >>> list(in_order([(1, "b"), (0, "a"), (2, "c")], range(3)))
    ['a', 'b', 'c']
    """
    early_values: dict[int | None, list[T]] = collections.defaultdict(list)
    remaining_numbers = iter(order)
    current_number = next(remaining_numbers, None)
    for number, value in numbered:
        early_values[number].append(value)
        while early_values[current_number]:
            ready_values = early_values.pop(current_number)
            yield from ready_values
            if not ends(ready_values[-1]):
                break
            current_number = next(remaining_numbers, None)


class JobCompletions:
    """Iterable over the completions of a job, in the order in which the requests were queued.

    `seconds` is the time spent decoding, excluding the time that the caller spends on the completions.
    """

    def __init__(self, job: Job, order: Sequence[int]):
        self.seconds = 0.0
        self._job, self._order = job, order
        self._queue = job.session.queue(job.requests, order=order)
        self._queue.warm_up()

    def __iter__(self) -> Iterator[Completion]:
        """Yield the completions. If the whole first batch fails, raise MarsError: later batches would fail too."""
        held_completions, any_succeeded = [], False
        for completion in in_order(self._timed(), self._order):
            self._job.finished.append(completion)
            any_succeeded = any_succeeded or completion.finish_reason != "failed"
            held_completions.append(completion)
            # Hold back completions until one has succeeded. With broken weights, none succeeds, and none is output.
            if any_succeeded:
                yield from held_completions
                held_completions.clear()
            elif len(held_completions) == self._job.session.batch_size:
                break
        if held_completions:
            self._job.check_finite()

    def _timed(self) -> Iterator[tuple[int, Completion]]:
        start_time = time.perf_counter()
        for index, completion in self._queue:
            if self._job.refining is not None:
                # Training time counts, because the next prompt waits for it.
                completion = self._job.refining.see(completion, self._queue)
            self.seconds += time.perf_counter() - start_time
            yield index, completion
            start_time = time.perf_counter()  # the time that the caller spends on a completion does not count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The prompts of a command, and the session that decodes them."""

    session: Session
    requests: list[Request]
    drafts: bool  # False for --draft none
    simulated: bool  # acceptance is simulated, so the text is meaningless
    run: JsonObject  # recorded in every row
    numbers: Sequence[Mapping[str, Any]]  # rule settings per prompt
    refining: Any  # `lab.training.online.Refining` of --refine, or None
    finished: list[Completion] = dataclasses.field(default_factory=list)

    def run_of(self, index: int) -> JsonObject:
        """Return the settings that are recorded in the row of prompt `index`."""
        return self.run | {"settings": self.run["settings"] | plain(self.numbers[index])}

    def decode(self, order: Sequence[int] | None = None) -> JobCompletions:
        """Compile, then decode all requests, or only those with the indices in `order`."""
        with busy("compiling"):
            return JobCompletions(self, order or range(len(self.requests)))

    def stream(self) -> Iterator[Said | Finished]:
        """Compile, then decode the requests step by step."""
        queue = self.session.queue(self.requests, telling=True)
        with busy("compiling"):
            queue.warm_up()
        return queue.events()

    def check_finite(self) -> None:
        """Raise MarsError if any prompt failed. Call it after the rows are written."""
        check_finite(self.session.target, self.finished)

    @property
    def trusts(self) -> bool:
        """True if drafts may have `trusted` nodes, which are accepted without verification."""
        return self.session.drafter.drafter.trusts


def open_job(
    args: argparse.Namespace,
    choices: Choices,
    rows: Sequence[PromptRow],
    target: Pretrained | None = None,
) -> Job:
    """Check prompts and vocabularies, using only configs and tokenizers, then load the weights.

    Args:
      args: the flags.
      choices: the result of `check_flags`.
      rows: the prompts.
      target: the target of an earlier job with the same flags, to avoid loading it again.

    Raises:
      MarsError: the checkpoints, the rule or the prompts are invalid.
    """
    # Before loading weights, check everything that needs only configs and tokenizers.
    sketch = target or hub.outline(args.target)
    requests = make_job_requests(sketch, args, rows)
    rule = load_rule(args.rule, sketch, rows)
    draft = choices.draft
    check_draft(sketch, draft)
    if args.refine is not None:
        check_file(args.refine, f"--refine is {args.refine}")
    if not sketch.has_tokenizer and not (args.json or args.output or args.compare):
        raise MarsError(
            f"'{args.target}' has no tokenizer and so no text to show: put its files next to the weights, or add "
            "--json for token ids."
        )
    # Load the weights of the target and of the draft.
    target = target or open_target(args, sketch)
    if target.mesh is not None:
        # Place the weights of the rule on the target's mesh.
        rule = load_rule(args.rule, target, rows)
    # "usual" stands for a short draft of adaptive length on a CPU, and for a draft of fixed length elsewhere.
    draft_size, num_draft_tokens = choices.draft_size, args.num_draft_tokens
    if draft_size == "usual":
        draft_size = "fixed"
        if jax.default_backend() == "cpu":
            draft_size, num_draft_tokens = "auto", num_draft_tokens or SHORT
    if args.draft_device is None:
        samples = draft.definition.samples and verify.needs_q(rule.rule)
        drafter = open_drafter(
            args, target, samples=samples, num_draft_tokens=num_draft_tokens, draft_size=draft_size
        )
    else:
        open_elsewhere = load_function("mars_jax.contrib.drafters.elsewhere:open_elsewhere")
        drafter = open_elsewhere(
            args.draft, target, args.draft_device, num_draft_tokens=num_draft_tokens, dtype=args.dtype
        )
    if args.theta_file is not None:
        args.theta_file.check_weights(target, drafter, rule)
    accepts_copies = draft.definition.copies and not args.rule.definition.lossless
    if accepts_copies and not args.compare and hosts.is_first():
        note = f"{args.rule.name} may accept repetitions that --verify exact rejects"
        print(f"note: the draft {draft.kind} copies earlier text, and {note}.", file=sys.stderr)
    is_simulated = args.rule.definition.name == "simulated"
    if is_simulated:
        _check_tau(args.rule, rows, drafter.drafter.max_depth + 1)
    default_batch_size = 1 if choices.streams else 8  # streamed text is shown one prompt after another
    # A drafter that learns needs the kind of each token, and kinds are only recorded along with log-probabilities.
    session = Session(
        target=target,
        drafter=drafter,
        loaded_rule=rule,
        batch_size=min(args.batch_size or default_batch_size, len(requests)),
        log_probs=args.log_probs or args.top_log_probs is not None or args.refine is not None,
        top_log_probs=args.top_log_probs or 0,
    )
    refining = None
    if args.refine is not None:
        any_sampling = any(request.temperature > 0 for request in requests)
        open_refining = load_function("mars_jax.lab.training.online:Refining")
        refining = open_refining(args, target, drafter, samples=any_sampling)
    run = {"version": __version__, "target": args.target, "draft": args.draft, **args.rule.as_json()}
    run |= {"tree": plain(args.tree), "num_draft_tokens": args.num_draft_tokens}
    run["dtype"] = args.dtype or _dtype(target.params)
    return Job(
        session=session,
        requests=requests,
        drafts=draft.kind != "none",
        simulated=is_simulated,
        run=run,
        numbers=[row.numbers for row in rows],
        refining=refining,
    )


def _dtype(params: PyTree) -> str:
    """Return the narrowest dtype of the weights: int4, mxfp4, int8 or a floating-point type."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, (Int4, Mxfp4)))
    names = {Int4: "int4", Mxfp4: "mxfp4"}
    dtypes = {names.get(type(leaf)) or str(leaf.dtype) for leaf in leaves}
    # DTYPES is ordered from wide to narrow.
    return next((name for name in ("int4", "mxfp4", *DTYPES[::-1]) if name in dtypes), "")


def load_rule(choice: RuleChoice, target: Pretrained, rows: Sequence[PromptRow]) -> LoadedRule:
    """Load the rule. A setting that some rows override becomes a list with one value per prompt."""
    row_settings = dict.fromkeys(name for row in rows for name in row.numbers)
    # For prompts that do not override a setting, use the value of its flag or its default.
    common = {name: setting.default for name, setting in choice.options.items()} | dict(choice.settings)
    per_row = {name: [row.numbers.get(name, common[name]) for row in rows] for name in row_settings}
    for name, values in per_row.items():
        if None in values:
            raise rows[values.index(None)].error(f"it has no {name}, which other rows have: give it one too.")
    return verify.load(choice.spec, target, **{**choice.settings, **per_row})


def _check_tau(choice: RuleChoice, rows: Sequence[PromptRow], limit: int) -> None:
    """Check that tau is at most `limit`, the number of tokens that a step can emit."""
    for row in rows:
        tau = row.numbers.get("tau") or choice.settings["tau"]
        if tau > limit:
            problem = f"is {tau:g}, and this draft gives {limit} tokens a step at most: ask for less, or draft deeper."
            if "tau" in row.numbers:
                raise row.error(f"tau {problem}")
            raise MarsError(f"--tau {problem}")


def make_job_requests(
    target: Pretrained, args: argparse.Namespace, rows: Sequence[PromptRow]
) -> list[Request]:
    """Tokenize all prompts. Row i of the whole run has id i and seed --seed + i, unless its prompt sets others.

    This happens before weights are loaded, so that a prompt that is too long is reported within seconds rather than
    after hours of work.

    Raises:
      MarsError: the model cannot process a prompt. The message states where the prompt comes from.
    """
    names = [*REQUEST, "stop_strings", "logit_bias", *CONSTRAINTS, *SPANS]
    flags = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    requests = []
    part_slice = args.part or slice(0, None, 1)
    # Row numbers within the whole run. They determine the seeds.
    row_numbers = range(part_slice.start, part_slice.start + part_slice.step * len(rows), part_slice.step)
    for number, row, tokens in zip(row_numbers, rows, _tokens(target, rows, args), strict=True):
        # Later entries take precedence: the flags, then the seed for this row number, then the row's own settings.
        settings = flags | {"seed": ((args.seed or 0) + number) % 2**32} | row.settings
        if any(name in row.settings for name in CONSTRAINTS):
            # A row's constraint replaces the one from the flags.
            settings |= {name: row.settings.get(name) for name in CONSTRAINTS}
        if args.relax_constrained and any(settings.get(name) is not None for name in CONSTRAINTS):
            settings["relax_constrained"] = True
        try:
            chat = bool(args.chat or row.messages)
            [request] = make_requests(target, [tokens], chat=chat, ignore_eos=args.ignore_eos, **settings)
            check_request(target, request)
        except MarsError as error:
            raise row.error(error) from None
        row_id = number if row.id is None else row.id
        requests.append(dataclasses.replace(request, prompt=row.prompt, messages=row.messages, id=row_id))
    return requests


def _tokens(
    target: Pretrained, rows: Sequence[PromptRow], args: argparse.Namespace
) -> Iterator[Sequence[int]]:
    """Yield the token ids of each prompt. Each chunk is tokenized on all cores.

    Raises:
      MarsError: a prompt cannot be tokenized. The message states where the prompt comes from.
    """
    encode_options = {"chat": args.chat, "system": args.system, "template_args": args.template_args}
    with activity.doing("tokenizing") as running_activity:
        for first in range(0, len(rows), CHUNK):
            chunk = rows[first : first + CHUNK]
            texts = [row.prompt or row.messages or "" for row in chunk if row.tokens is None]
            # If the prompts cannot be encoded together, encode them one at a time, to find the one at fault.
            encoded_prompts = (target.encode(text, **encode_options) for text in texts)
            with contextlib.suppress(MarsError):
                if texts:
                    encoded_prompts = iter(target.encode_many(texts, **encode_options))
            for row in chunk:
                try:
                    yield next(encoded_prompts) if row.tokens is None else row.tokens
                except MarsError as error:
                    raise row.error(error) from None
            running_activity.detail = f"{first + len(chunk)} of {len(rows)} prompts"
