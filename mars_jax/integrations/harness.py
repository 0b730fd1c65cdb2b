"""`mars-jax lm_eval`: the command line of lm-evaluation-harness, with `--model mars_jax` in it.

The harness finds models in a registry and has no plugins, so this module enters ours and hands over; a program that
calls `lm_eval.simple_evaluate(model="mars_jax", ...)` imports it first. `generate_until` decodes with the draft and
the rule, so that their quality is what a task measures; likelihoods are the target's own, whatever the rule.

Oracle: PyTorch transformers with the same checkpoint, in tests/integrations/test_harness.py.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from mars_jax import assets, constraints, drafters, hub, specs
from mars_jax import verify as rules
from mars_jax.cli import remote
from mars_jax.cli.flags import draft_of, part_of
from mars_jax.cli.generate.output_file import fingerprints
from mars_jax.cli.open_target import check_draft, open_mesh
from mars_jax.cli.progress import progress, speed
from mars_jax.cli.rule_flags import rule_and_file
from mars_jax.core.conversation import as_conversation
from mars_jax.core.errors import MarsError
from mars_jax.hub.chat_template import bounded_templates
from mars_jax.hub.pretrained import Pretrained
from mars_jax.integrations.answer_file import Answers
from mars_jax.placement import hosts
from mars_jax.serve.likelihood import score
from mars_jax.serve.queue import longest_first
from mars_jax.serve.requests import make_requests
from mars_jax.serve.rows import RowFile
from mars_jax.serve.session import Session

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:
    raise MarsError("the package lm-eval is not installed: pip install lm-eval.") from None

_ELSEWHERE = {
    *("self", "__class__", "settings", "verify"),  # the rule is recorded as it is resolved
    *("batch_size", "prefill_chunk", "mesh", "coordinator", "num_processes", "process_id"),
    *("max_batch_size", "device", "rows", "part"),
}
"""Arguments of a model that decide no answer."""
CHUNK = 32
"""Batches of likelihoods that are written together; texts of one length share them."""


@register_model("mars_jax")
class MarsJax(TemplateLM):
    """A target and its draft as the harness sees a model; the arguments are those of `--model_args`."""

    def __init__(
        self,
        target: str = assets.TARGET,
        draft: str | None = None,
        verify: str | None = None,
        num_draft_tokens: int | None = None,
        tree: str | None = None,
        dtype: str | None = None,
        cache_dtype: str | None = None,
        prefill_chunk: int | None = None,
        attention: str = "auto",
        max_gen_toks: int = 256,
        seed: int = 0,
        regex: str | None = None,
        json_schema: str | None = None,
        choice: str | None = None,
        mesh: str | None = None,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        rows: str | None = None,
        part: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ):
        """
        Args:
          target, draft, dtype, cache_dtype, prefill_chunk, attention, num_draft_tokens, tree: as for
            `python -m mars_jax.generate`; without a draft the target decodes alone, but for the embedded family.
          verify: a rule as for `python -m mars_jax.generate`, by default exact, or mars where one of its settings is
            given; one of your own is named as FILE.py:NAME, and its file is run.
          max_gen_toks: most new tokens of a task that does not say.
          seed: request i draws with seed + i.
          regex, json_schema, choice: what every generated text is to be: a pattern, a file with a schema, or texts
            divided by "|". A task may say so itself in its generation_kwargs, choice there as a list.
          mesh: axes with their sizes, joined by a plus since commas part arguments: data=2+model=4.
          coordinator, num_processes, process_id: as for `python -m mars_jax.generate`; every process gives the harness
            the same results, and only one should be given an --output_path.
          rows: a file of answers, one row each. A run with the same arguments answers only the requests that it lacks.
          part: I/N, as for `python -m mars_jax.generate`. The evaluation ends with `Answered`, without a score; a run
            without `part` scores the rows of all parts, joined in one file.
          batch_size: prompts that decode side by side, a number; a row that ends is begun again with the next one.
          max_batch_size, device: what the harness always passes; JAX chooses the device by itself.
          **settings: of the rule, such as theta, a number or a file of `mars-jax calibrate`, margin and base.

        Raises:
          MarsError: with one sentence that names what is wrong and the cure.
        """
        arguments = dict(locals())
        empty = [name for name, value in arguments.items() if value == ""]
        if empty:
            raise MarsError(f"{empty[0]} is empty: give it a value, or leave it out.")
        super().__init__()
        if part is not None and rows is None:
            raise MarsError("part does not apply without rows, the file of its answers: add it.")
        share = None if part is None else part_of(part)
        if rows is not None:
            remote.refuse(rows, "rows")
        size = str(batch_size)
        if not (size.isascii() and size.isdigit() and len(size) < 10 and int(size)):
            raise MarsError(f"batch_size is {batch_size}: expected a whole number of at least 1.")
        if target != assets.TARGET:
            draft = draft or "none"
        specs.REQUEST["max_new_tokens"].check(max_gen_toks, shown="max_gen_toks")
        specs.REQUEST["seed"].check(seed, shown="seed")
        if num_draft_tokens is not None:
            specs.REQUEST["num_draft_tokens"].check(num_draft_tokens, shown="num_draft_tokens")
        kind, _ = spec = specs.parse_draft(draft_of(draft, target), shown="draft")
        shape = None if tree is None else specs.parse_tree(tree, shown="tree")
        given = {name: specs.Given(str(value), name) for name, value in settings.items()}
        named, file = rule_and_file(verify, given, "mars" if given and kind != "none" else "exact")
        if "long" in named.needs:
            raise MarsError(f"verify is {named.name}, whose text means nothing: choose another rule.")
        if file is not None:
            drafts = {"draft": draft_of(draft, target), "num_draft_tokens": num_draft_tokens, "tree": shape}
            file.check({"target": target} | drafts)
        if mesh is None and (coordinator, num_processes, process_id) != (None, None, None):
            raise MarsError(
                "coordinator, num_processes and process_id do not apply without mesh, over which several processes "
                "divide the work: add it."
            )
        if mesh is not None:
            hosts.connect(coordinator, num_processes, process_id)
        if rows is not None and jax.process_count() > 1:
            raise MarsError("rows does not apply to several processes that decode as one: leave it out.")
        given = {"regex": regex, "json_schema": json_schema, "choice": choice and str(choice).split("|")}
        self._constraint = constraints.from_fields({name: value for name, value in given.items() if value})
        told = {name: value for name, value in arguments.items() if name not in _ELSEWHERE}
        told |= {"draft": draft_of(draft, target), "verify": named.spec, **named.settings}
        told["rule_source"] = specs.source_digest(named.spec)
        if json_schema and self._constraint is not None:
            told["json_schema"] = self._constraint.content  # the file's, which may change
        if rows is not None:
            # Refuse a wrong file before the weights are loaded.
            RowFile(rows, told, flag="--rows").close()
        sketch = hub.outline(target)
        if not sketch.has_tokenizer:
            raise MarsError(
                f"'{target}' has no tokenizer, and tasks are text: put its files beside the weights."
            )
        check_draft(sketch, spec)
        rules.load(named.spec, sketch, **named.settings)
        loaded = hub.load(
            target,
            dtype=dtype,
            mesh=None if mesh is None else open_mesh(mesh.replace("+", ","), sketch.config),
            cache_dtype=cache_dtype,
            prefill_chunk=prefill_chunk,
            attention=attention,
        )
        rule = rules.load(named.spec, loaded, **named.settings)
        drafter = drafters.load(
            draft_of(draft, target),
            loaded,
            num_draft_tokens=num_draft_tokens,
            tree=shape,
            sample=spec.row.samples and rules.needs_q(rule.rule),
            dtype=dtype if spec.row.path else None,
        )
        if file is not None:
            file.check_weights(loaded, drafter, rule)
        self._session = Session(target=loaded, drafter=drafter, rule=rule, batch_size=int(batch_size))
        self._answers = None
        if rows is not None:
            row_file = RowFile(rows, told, flag="--rows")
            row_file.start(fingerprints(self._session, spec))
            self._answers = Answers(row_file, share)
        self._max_gen_toks, self._seed = max_gen_toks, seed
        self.tokenizer = loaded.tokenizer
        self._template: str | None = None

    @property
    def _target(self) -> Pretrained:
        return self._session.target

    @property
    def rank(self) -> int:
        """0. The harness reads this property again after the last answer, and the file of rows is then closed."""
        if self._answers is not None:
            self._answers.end()
        return super().rank

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse the harness's own cache if there is a file of rows: it would keep the placeholders of other parts.

        Raises:
          MarsError: there is a file of rows.
        """
        if self._answers is not None:
            raise MarsError("--use_cache does not apply with rows, which keep the answers too: leave it out.")
        super().set_cache_hook(cache_hook)

    @property
    def eot_token_id(self) -> int:
        """The token in front of a text that has no context."""
        return self._target.stop_tokens[0]

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text that has no context: the one that begins texts, else the one that ends them."""
        bos = self._target.config.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """For the harness's record of a run."""
        return self._target.name.replace("/", "__")

    @property
    def max_length(self) -> int:
        """The context of the target."""
        return self._target.config.max_positions

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that `apply_chat_template` takes from now on, for the harness's record of a run.

        Args:
          chat_template: True for the tokenizer's own, the name of one of several, or False for none.

        Raises:
          MarsError: the tokenizer has no such template.
        """
        if not chat_template:
            return None
        found = getattr(self.tokenizer, "chat_template", None)
        named = found if isinstance(found, dict) else {"default": found}
        name = "default" if chat_template is True else chat_template
        if named.get(name) is None:
            known = ", ".join(key for key, text in named.items() if text) or "none at all"
            raise MarsError(
                f"'{self._target.name}' has no chat template '{name}' (it has {known}): leave --apply_chat_template "
                "out, or use an instruction-tuned model."
            )
        self._template = named[name]
        return self._template

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text that is tokenized.

        Args:
          chat_history: turns, each with its `role` and `content`.
          add_generation_prompt: end where the model is to answer; else within the last turn, which it continues.

        Raises:
          MarsError: there is no template, or it does not take these turns.
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
        except Exception as error:  # a template is a program, and may raise anything
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise MarsError(
                f"the chat template of '{self._target.name}' cannot be applied ({reason.rstrip('.')}): leave "
                "--apply_chat_template out, or what it refuses, such as a system instruction."
            ) from None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; special tokens as the tokenizer adds them, unless told otherwise.

        A text that begins with the token that begins texts, as a chat template's does, gets no second one.
        """
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, **options)["input_ids"])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # A context that is too long loses its beginning, as everywhere in the harness.
        texts = [(context + wanted)[-self.max_length :] for _, context, wanted in requests]
        answers = []
        for request, found in zip(
            requests, score(self._target, texts, rows=self._session.batch_size), strict=True
        ):
            wanted = request[2]
            n = min(len(wanted), len(found.log_p))
            greedy = found.best[len(found.best) - n :].tolist() == wanted[len(wanted) - n :]
            answers.append((float(found.log_p[len(found.log_p) - n :].sum(dtype="float64")), greedy))
        return answers

    def _each(
        self, kind: str, requests: Sequence[Any], answer: Callable[[Sequence[int]], Iterable[Any]], other: Any
    ) -> list[Any]:
        """Return the answers: those on file, those of `answer`, and `other` for requests of other parts."""
        if self._answers is None:
            return list(answer(range(len(requests))))
        return self._answers.of(kind, requests, answer, other)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Likelihood of texts after their contexts, and whether greedy decoding gives them."""
        ask, size = super().loglikelihood, CHUNK * (self._session.batch_size or 1)

        def answer(numbers: Sequence[int]) -> Iterator[tuple[float, bool]]:
            for first in range(0, len(numbers), size):
                yield from ask(
                    [requests[i] for i in numbers[first : first + size]], disable_tqdm=disable_tqdm
                )

        found = self._each("loglikelihood", requests, answer, (0.0, False))
        return [(float(log_p), greedy) for log_p, greedy in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Likelihood of whole texts, in windows of the context where they are longer."""

        def answer(numbers: Sequence[int]) -> Iterator[float]:
            for i in numbers:
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(requests[i].args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
                pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
                yield sum(log_p for log_p, _ in self._loglikelihood_tokens(pairs))

        return [float(log_p) for log_p in self._each("loglikelihood_rolling", requests, answer, 0.0)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Decode with the draft and the rule, up to the first of a request's stop strings.

        Tau and tokens per second are printed on stderr.
        """
        return self._each("generate_until", requests, lambda numbers: self._generate(requests, numbers), "")

    def _generate(self, requests: Sequence[Any], numbers: Sequence[int]) -> Iterator[str]:
        """Yield the texts of some requests, in their order."""
        made = []
        for index, request in enumerate(requests):
            context, options = request.args
            limit, until, sampling = _options(options, self._max_gen_toks)
            if self._constraint is not None and not any(name in sampling for name in constraints.KINDS):
                sampling["constraint"] = self._constraint
            ids = self.tok_encode(context)[-max(1, self.max_length - limit) :]
            made += make_requests(
                self._target,
                [ids],
                chat=self._template is not None,
                max_new_tokens=limit,
                seed=(self._seed + index) % 2**32,
                stop_strings=until,
                **sampling,
            )
        if not made:
            return
        # Rows are written in the order of the requests, so with a file of rows, decode them in that order.
        queue = self._session.queue(made, order=longest_first(made) if self._answers is None else numbers)
        began, ended, waiting = time.perf_counter(), {}, iter(numbers)
        tokens = steps = 0
        with progress("prompts") as show:
            following = next(waiting)
            for done, (index, completion) in enumerate(queue, start=1):
                ended[index] = completion.text
                tokens += completion.metrics.emitted
                steps += completion.metrics.steps
                show(done, len(numbers), speed(tokens, steps, time.perf_counter() - began))
                while following in ended:
                    yield ended.pop(following)
                    following = next(waiting, -1)
        if hosts.is_first():
            rate = speed(tokens, steps, time.perf_counter() - began)
            print(f"mars_jax: {len(numbers)} answers, {rate}", file=sys.stderr)


def _options(given: dict[str, Any], limit: int) -> tuple[int, list[str], dict[str, Any]]:
    """(most new tokens, stop strings, sampling) of a task's gen_kwargs."""
    left = dict(given)
    until = left.pop("until", None) or []
    limit = int(left.pop("max_gen_toks", left.pop("max_new_tokens", limit)))
    sampled = bool(left.pop("do_sample", float(left.get("temperature") or 0) > 0))
    sampling = {name: left.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in left}
    held = {name: left.pop(name) for name in ("regex", "json_schema", "choice") if name in left}
    if left:
        raise MarsError(
            f"the task asks for {', '.join(sorted(left))} in its gen_kwargs, which this model does not have: take it "
            "out with --gen_kwargs or in the task."
        )
    if not sampled:
        sampling = {}
    elif not math.isfinite(float(sampling.setdefault("temperature", 1.0))):
        raise MarsError(f"temperature is {sampling['temperature']}: expected a finite number.")
    until = [until] if isinstance(until, str) else [stop for stop in until if stop]
    return limit, until, sampling | held
