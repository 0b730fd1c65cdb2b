"""The model `mars_jax` of lm-evaluation-harness.

Importing this module adds the model to the harness's registry, because the harness has no plugin mechanism. A program
that calls `lm_eval.simple_evaluate(model="mars_jax", ...)` must import it first. `generate_until` decodes with the
draft and the rule, so that a task measures their quality. Likelihoods come from the target and do not depend on the
rule.

Tested against PyTorch transformers with the same checkpoint, in tests/integrations/test_harness.py.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax

import mars_jax as mj
from mars_jax.cli import remote
from mars_jax.cli.flags import flag_of, part_of
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.job import in_order, open_job
from mars_jax.cli.generate.output import fingerprints, recorded
from mars_jax.cli.progress import progress, speed
from mars_jax.hub.chat_template import bounded_templates
from mars_jax.hub.conversation import as_conversation
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.likelihood import score
from mars_jax.serve.queue import longest_first
from mars_jax.serve.requests import make_requests
from mars_jax.serve.rows import RowFile, digest, plain
from mars_jax.utils import assets, hosts
from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.settings import REQUEST
from mars_jax.utils.types import JsonObject

try:
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:
    raise MarsError("the package lm-eval is not installed: pip install lm-eval.") from None

FLAGS = (
    *("verify", "num_draft_tokens", "tree", "dtype", "cache_dtype", "prefill_chunk", "attention", "seed"),
    *("batch_size", "regex", "json_schema", "coordinator", "num_processes", "process_id"),
)
"""Arguments of the model that are also flags of `generate`, with the same values."""
CHUNK = 32
"""Number of likelihood batches whose rows are written together. Within these, texts of similar length share a batch."""


class Answered(Exception):
    """Exception that ends the evaluation of one part of the requests, without a score.

    Its message includes the number of rows in the file.
    """


@register_model("mars_jax")
class MarsJax(TemplateLM):
    """A target and its draft, as a model for the harness. The arguments come from `--model_args`."""

    def __init__(
        self,
        target: str = assets.TARGET,
        draft: str | None = None,
        max_gen_toks: int = 256,
        choice: str | None = None,
        mesh: str | None = None,
        rows: str | None = None,
        part: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **arguments: Any,
    ):
        """
        Args:
          target, draft: as for `python -m mars_jax.generate`, but by default only the target included in the package
            has a draft.
          max_gen_toks: maximum number of new tokens in tasks that do not limit them.
          choice: strings separated by "|". Every generated text is constrained to one of them, unless a task sets
            constraints in its generation_kwargs. There, `choice` is a list.
          mesh: axes with their sizes, joined by a plus because commas separate arguments: data=2+model=4.
          rows: path of a file that stores one row per answer. A later run with the same arguments answers only the
            requests that have no row in the file.
          part: I/N, as for `python -m mars_jax.generate`. The evaluation ends with `Answered`, without a score; a run
            without `part` then scores the rows of all parts, joined in one file.
          max_batch_size, device: ignored; the harness always passes them.
          **arguments: `FLAGS` of `python -m mars_jax.generate`, and settings of the rule, such as theta. Request i is
            sampled with seed + i. In a run of several processes, only one should be given an --output_path.

        Raises:
          MarsError: an argument is invalid; the message names it and the fix.
        """
        super().__init__()
        if part is not None and rows is None:
            raise MarsError("part does not apply without rows, the file of its answers: add it.")
        self._part = None if part is None else part_of(part)
        if rows is not None:
            remote.refuse(rows, "rows")
        REQUEST["max_new_tokens"].check(max_gen_toks, shown="max_gen_toks")
        args = parse(_to_flags(target, draft, choice, mesh, arguments))
        if "long" in args.rule.needs:
            raise MarsError(f"verify is {args.rule.name}, whose text means nothing: choose another rule.")
        choices = check_flags(args, [])
        if args.mesh is not None:
            hosts.connect(args.coordinator, args.num_processes, args.process_id)
        if rows is not None and jax.process_count() > 1:
            raise MarsError("rows does not apply to several processes that decode as one: leave it out.")
        # Before loading the weights, reject a file that was written by a run with different settings.
        self._rows = None
        if rows is not None:
            run_settings = recorded(args, []) | {"max_gen_toks": max_gen_toks}
            self._rows = RowFile(rows, run_settings, flag="--rows")
        try:
            session = open_job(args, choices, []).session
            self._session = dataclasses.replace(session, batch_size=args.batch_size or 1)
            if self._rows is not None:
                self._rows.start(fingerprints(self._session, choices.draft))
        except BaseException:
            self._close()
            raise
        self._count, self._answered, self._ended = 0, 0, False
        self._constraint = mj.constraints.from_fields(
            {"regex": args.regex, "choice": args.choice, "json_schema": args.json_schema}
        )
        self._max_gen_toks, self._seed = max_gen_toks, args.seed or 0
        self.tokenizer = self._target.tokenizer
        self._template: str | None = None

    def _close(self) -> None:
        """Close the file of rows, so that the same program can open it again."""
        if self._rows is not None:
            self._rows.close()

    @property
    def _target(self) -> Pretrained:
        return self._session.target

    @property
    def rank(self) -> int:
        """The rank, which is 0. The harness reads it after the last answer, and this read closes the file of rows.

        Raises:
          Answered: the run answers only one part of the requests.
          MarsError: the part contains none of the requests.
        """
        # Only the first read after a request ends the run. Other reads have no effect.
        if self._rows is None or not self._count or self._ended:
            return super().rank
        self._ended = True
        self._close()
        if self._part is None:
            return super().rank
        if not self._answered:
            raise MarsError(f"--part has none of the {self._count} requests: divide them into fewer parts.")
        raise Answered(f"{self._rows.path}: {self._answered} of {self._count} rows")

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse the harness's cache if there is a file of rows: the cache would store the placeholders of other parts.

        Raises:
          MarsError: there is a file of rows.
        """
        if self._rows is not None:
            raise MarsError("--use_cache does not apply with rows, which keep the answers too: leave it out.")
        super().set_cache_hook(cache_hook)

    @property
    def eot_token_id(self) -> int:
        """The first stop token of the target."""
        return self._target.stop_tokens[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the beginning-of-sequence token, or else the end-of-text token."""
        bos_token_id = self._target.config.bos_token_id
        return self.eot_token_id if bos_token_id is None else bos_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's record of a run."""
        return self._target.name.replace("/", "__")

    @property
    def max_length(self) -> int:
        """The target's maximum context length."""
        return self._target.config.max_positions

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Select the template for later `apply_chat_template` calls, and return it for the harness's record of a run.

        Args:
          chat_template: True for the tokenizer's default template, the name of one of its templates, or False for none.

        Raises:
          MarsError: the tokenizer has no such template.
        """
        if not chat_template:
            return None
        # transformers stores a single template as a string, and several as a dict keyed by name.
        templates = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(templates, dict):
            templates = {"default": templates}
        name = "default" if chat_template is True else chat_template
        if templates.get(name) is None:
            names = ", ".join(key for key, text in templates.items() if text) or "none at all"
            raise MarsError(
                f"'{self._target.name}' has no chat template '{name}' (it has {names}): leave --apply_chat_template "
                "out, or use an instruction-tuned model."
            )
        self._template = templates[name]
        return self._template

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation as a string to tokenize.

        Args:
          chat_history: turns, each with its `role` and `content`.
          add_generation_prompt: whether to append the beginning of the model's answer; if False, the string ends within
            the last turn, which the model continues.

        Raises:
          MarsError: there is no template, or it does not accept these turns.
        """
        if self._template is None:
            self.chat_template(True)
        turns = as_conversation(chat_history)
        try:
            with bounded_templates():
                return self.tokenizer.apply_chat_template(
                    turns,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
        except Exception as error:  # a template is a program, so it may raise any exception
            raise MarsError(
                f"the chat template of '{self._target.name}' cannot be applied ({first_line(error)}): leave "
                "--apply_chat_template out, or what it refuses, such as a system instruction."
            ) from None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a string. By default the tokenizer adds its special tokens.

        A string that already begins with the beginning-of-sequence token, such as a rendered chat template, gets no
        second one.
        """
        bos_token = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None:
            add_special_tokens = not (bos_token and string.startswith(bos_token))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # If a text is too long, drop its beginning, as the harness does.
        texts = [(context + continuation)[-self.max_length :] for _, context, continuation in requests]
        scores = score(self._target, texts, rows=self._session.batch_size)
        answers = []
        for (_key, _context, continuation), scored in zip(requests, scores, strict=True):
            # A score covers all tokens of a text except the first one. Use the last `n` of them, which are those of the
            # continuation.
            n = min(len(continuation), len(scored.log_p))
            is_greedy = scored.best[len(scored.best) - n :].tolist() == continuation[len(continuation) - n :]
            answers.append((float(scored.log_p[len(scored.log_p) - n :].sum(dtype="float64")), is_greedy))
        return answers

    def _each(
        self,
        kind: str,
        requests: Sequence[Instance],
        answer: Callable[[Sequence[int]], Iterable[Any]],
        placeholder: Any,
    ) -> list[Any]:
        """Answer the requests of one call from the harness, reusing rows in the file and appending new ones.

        Each row stores the number of its request in the whole run, so that the rows of several parts can be joined. The
        harness always makes its calls in the same order.

        Args:
          kind: type of the requests, such as "generate_until".
          requests: all requests of the call, including those of other parts.
          answer: function that yields the answers to the requests with the given indices, in order. Each answer is
            written immediately.
          placeholder: answer to return for requests of other parts.

        Raises:
          MarsError: the file contains answers to different requests, or cannot be written.
        """
        if self._rows is None:
            return list(answer(range(len(requests))))
        if self._ended:
            raise MarsError(f"the run of '{self._rows.path}' has ended: make another model for another run.")
        row_by_number = {row.get("id"): row for row in self._rows.rows}
        # Indices of this call's requests among all requests of the run.
        numbers = range(self._count, self._count + len(requests))
        part = self._part or slice(0, None, 1)
        part_indices = [i for i, n in enumerate(numbers) if n % part.step == part.start]
        self._count += len(requests)
        answers = [placeholder] * len(requests)
        # Digests of the requests' arguments, which a later run uses to detect rows of other tasks.
        keys = [f"{kind} {digest(repr(request.args).encode())}" for request in requests]
        try:
            missing_indices = []
            for index in part_indices:
                row = row_by_number.get(numbers[index])
                if row is None:
                    missing_indices.append(index)
                elif row.get("request") != keys[index]:
                    raise MarsError(
                        f"row {numbers[index]} of '{self._rows.path}' answers another request: choose another --rows, "
                        "or the tasks of the run that began it."
                    )
                else:
                    answers[index] = row["answer"]
            if missing_indices:
                for index, value in zip(missing_indices, answer(missing_indices), strict=True):
                    self._rows.append({"id": numbers[index], "request": keys[index], "answer": plain(value)})
                    answers[index] = self._rows.rows[-1]["answer"]
        except BaseException:
            self._close()
            raise
        self._answered += len(part_indices)
        return answers

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood given its context, and whether greedy decoding generates it."""
        score_chunk, chunk_size = super().loglikelihood, CHUNK * (self._session.batch_size or 1)

        # Answer in chunks, so that the rows of one chunk are written before the next chunk is scored.
        def answer(numbers: Sequence[int]) -> Iterator[tuple[float, bool]]:
            for first in range(0, len(numbers), chunk_size):
                yield from score_chunk(
                    [requests[i] for i in numbers[first : first + chunk_size]], disable_tqdm=disable_tqdm
                )

        answers = self._each("loglikelihood", requests, answer, (0.0, False))
        return [(float(log_p), greedy) for log_p, greedy in answers]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text. Texts longer than the context are scored in windows."""

        def answer(numbers: Sequence[int]) -> Iterator[float]:
            for i in numbers:
                # Leave room in every window for one token of context before the scored tokens.
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(requests[i].args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
                window_requests = [(None, *utils.make_disjoint_window(window)) for window in windows]
                yield sum(log_p for log_p, _ in self._loglikelihood_tokens(window_requests))

        return [float(log_p) for log_p in self._each("loglikelihood_rolling", requests, answer, 0.0)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decode with the draft and the rule, up to the first of a request's stop strings.

        Tau and tokens per second are printed to stderr.
        """
        return self._each("generate_until", requests, lambda numbers: self._generate(requests, numbers), "")

    def _generate(self, requests: Sequence[Instance], numbers: Sequence[int]) -> Iterator[str]:
        """Yield the completions of some requests, in the order of the requests."""
        queued_requests = []
        # Create the requests of other parts too, because a request's seed depends on its index in the whole call.
        for index, request in enumerate(requests):
            context, options = cast(tuple[str, JsonObject], request.args)
            max_new_tokens, stop_strings, sampling = _options(options, self._max_gen_toks)
            if self._constraint is not None and not any(name in sampling for name in mj.constraints.KINDS):
                sampling["constraint"] = self._constraint
            # Drop the beginning of a long context, to leave room for the new tokens.
            prompt_tokens = self.tok_encode(context)[-max(1, self.max_length - max_new_tokens) :]
            queued_requests += make_requests(
                self._target,
                [prompt_tokens],
                chat=self._template is not None,
                max_new_tokens=max_new_tokens,
                seed=(self._seed + index) % 2**32,
                stop_strings=stop_strings,
                **sampling,
            )
        if not queued_requests:
            return
        # A file stores rows in request order, so if there is a file, decode the requests in that order.
        order = longest_first(queued_requests) if self._rows is None else numbers
        queue = self._session.queue(queued_requests, order=order)
        queue.warm_up()
        start_time, num_tokens, num_steps, speed_text = time.perf_counter(), 0, 0, ""

        def texts() -> Iterator[tuple[int, str]]:
            nonlocal num_tokens, num_steps, speed_text
            for num_done, (index, completion) in enumerate(queue, start=1):
                num_tokens += completion.metrics.emitted
                num_steps += completion.metrics.steps
                speed_text = speed(num_tokens, num_steps, time.perf_counter() - start_time)
                show(num_done, len(numbers), speed_text)
                yield index, completion.text

        with progress("prompts") as show:
            yield from in_order(texts(), numbers)
        if hosts.is_first():
            print(f"mars_jax: {len(numbers)} answers, {speed_text}", file=sys.stderr)


def _options(gen_kwargs: JsonObject, limit: int) -> tuple[int, list[str], JsonObject]:
    """Return (maximum new tokens, stop strings, sampling options) from a task's gen_kwargs."""
    kwargs = dict(gen_kwargs)
    stop_strings = kwargs.pop("until", None) or []
    if isinstance(stop_strings, str):
        stop_strings = [stop_strings]
    # This removes both names, because Python always evaluates the default of the outer `pop`.
    limit = int(kwargs.pop("max_gen_toks", kwargs.pop("max_new_tokens", limit)))
    # Without `do_sample`, a temperature above 0 turns on sampling.
    is_sampled = bool(kwargs.pop("do_sample", float(kwargs.get("temperature") or 0) > 0))

    def taken(*names: str) -> JsonObject:
        return {name: kwargs.pop(name) for name in names if name in kwargs}

    sampling_options = taken("temperature", "top_k", "top_p", "min_p")
    constraint_options = taken("regex", "json_schema", "choice")
    if kwargs:
        raise MarsError(
            f"the task sets {', '.join(sorted(kwargs))} in its gen_kwargs, which this model does not support: "
            "remove it with --gen_kwargs or in the task."
        )
    # Greedy decoding ignores a task's temperature and truncation settings.
    if not is_sampled:
        sampling_options = {}
    elif not math.isfinite(float(sampling_options.setdefault("temperature", 1.0))):
        raise MarsError(f"temperature is {sampling_options['temperature']}: expected a finite number.")
    return limit, [text for text in stop_strings if text], sampling_options | constraint_options


def _to_flags(
    target: str, draft: str | None, choice: str | None, mesh: str | None, arguments: dict[str, Any]
) -> list[str]:
    """Return the arguments as flags of `generate`, so that they are parsed and checked in the same way."""
    default_draft = "none"
    if target == assets.TARGET:
        default_draft = f"model:{assets.DRAFT}"
    argv = [f"--target={target}", f"--draft={draft or default_draft}"]
    if choice is not None:
        argv += [f"--choice={text}" for text in str(choice).split("|")]
    if mesh is not None:
        argv.append(f"--mesh={mesh.replace('+', ',')}")
    for name, value in arguments.items():
        flag = flag_of(name) if name in FLAGS else f"--rule-option={name}"
        argv.append(f"{flag}={value}")
    return argv
