"""Problems to evaluate on, read from local files in the layouts in which they are published.

The question sets of the MARS release and Spec-Bench have `question_id`, `category`, `turns` and `reference`; GSM8K,
HumanEval and MBPP are read in their own layouts too. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mars_jax.errors import MarsError
from mars_jax.evaluate.jsonl import Fields, read_jsonl
from mars_jax.tasks import arithmetic
from mars_jax.training.data import documents

ARITHMETIC_PROBLEMS = 200
"""Problems of the generator, which has no end, where no number is asked for."""
STORY_WORDS = 24
"""Words of a document that are given; it must have as many again to go on with."""


class Code(NamedTuple):
    """What a generated program is run with."""

    prompt: str  # the beginning of the program, "" where the model writes it all
    entry_point: str  # the function asked for, "" where the tests say it
    tests: str  # run behind the program; fail by an exception


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt, of one turn or more, and how its answer is scored."""

    task: str
    id: str  # unique within the task
    turns: tuple[str, ...]
    metric: str = "none"  # one of `scores.METRICS`
    references: tuple[str, ...] = ()
    code: Code | None = None
    continues: bool = False  # plain text to go on with, which no chat template fits


def read(name: str, path: str | None = None, *, chat: bool, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems of a task, and of each part of Spec-Bench.

    Args:
      name: one of `TASKS`.
      path: of its file; none for arithmetic, whose problems are generated.
      chat: whether the prompts will go through a chat template; plain prompts say in their own words what is wanted.
      limit: None for all.

    Raises:
      MarsError: unknown task, a file that cannot be read, a line that is no problem of the task.

    >>> [problem] = read("arithmetic", chat=True, limit=1)
    >>> problem.metric, problem.references
    ('final_answer', ('33',))
    """
    if name not in TASKS:
        raise MarsError(f"there is no task '{name}': choose one of {', '.join(TASKS)}.")
    if name == "arithmetic":
        if path is not None:
            raise MarsError(
                "the task arithmetic generates its problems and takes no file: leave its path out."
            )
        return _arithmetic(ARITHMETIC_PROBLEMS if limit is None else limit)
    if not path:
        raise MarsError(f"the task {name} needs a file: write {name}=PATH.")
    if name == "stories":
        return list(itertools.islice(_stories(path), limit))
    problems, seen = [], Counter[str]()
    for number, fields in enumerate(read_jsonl(path)):
        problem = _READERS[name](fields, str(_id(fields, number)), chat)
        seen[problem.task] += 1
        if limit is None or seen[problem.task] <= limit:
            problems.append(problem)
    if not problems:
        raise MarsError(f"'{path}' holds no problems: give one object a line.")
    _check(problems, path)
    # The parts of Spec-Bench one after another, each in the order of the file.
    return [p for task in seen for p in problems if p.task == task]


def _id(fields: Fields, number: int) -> str | int:
    for key in ("id", "task_id", "question_id"):
        value = fields.values.get(key)
        if isinstance(value, str | int):
            return value
    return number


def _check(problems: Sequence[Problem], path: str) -> None:
    if len(metrics := {(p.task, p.metric) for p in problems}) > len({task for task, _ in metrics}):
        raise MarsError(f"'{path}' mixes metrics, which have no common mean: make a file of each.")
    (task, name), count = Counter((p.task, p.id) for p in problems).most_common(1)[0]
    if count > 1:
        raise MarsError(f"'{path}' has {count} problems of {task} with the id {name}: give each its own.")


def _arithmetic(count: int) -> list[Problem]:
    return [
        Problem(
            task="arithmetic",
            id=str(number),
            turns=(problem.question,),
            metric="final_answer",
            references=(str(problem.result),),
        )
        for number, problem in enumerate(arithmetic.generate(count, split="eval"))
    ]


def _stories(path: str) -> Iterator[Problem]:
    """The beginnings of documents. They are cut between words, so any tokenizer gets the same prompts."""
    opening = re.compile(rf"\s*(?:\S+\s+){{{STORY_WORDS - 1}}}\S+")
    found = False
    for number, document in enumerate(documents(path)):
        if len(document.split(maxsplit=2 * STORY_WORDS)) > 2 * STORY_WORDS and (
            head := opening.match(document)
        ):
            found = True
            yield Problem(task="stories", id=str(number), turns=(head[0],), continues=True)
    if not found:
        raise MarsError(
            f"'{path}' has no document of more than {2 * STORY_WORDS} words: give longer ones, divided by lines of "
            "<|endoftext|>."
        )


_Reader = Callable[[Fields, str, bool], Problem]  # (line, id, chat)

_GSM8K_EXAMPLES = """\
Question: A box holds 12 pencils. Mia buys 3 boxes and gives 5 pencils away. How many pencils does she have left?
Answer: Mia buys 3 * 12 = 36 pencils. She has 36 - 5 = 31 pencils left.
#### 31

Question: A train goes 60 miles an hour for 2 hours and then 40 miles more. How many miles does it go in all?
Answer: In 2 hours the train goes 2 * 60 = 120 miles. In all it goes 120 + 40 = 160 miles.
#### 160

"""


def _gsm8k(fields: Fields, name: str, chat: bool) -> Problem:
    """Plain prompts carry two worked examples, of our own making, that show the form of an answer."""
    question = fields.text("question") if fields.has("question") else fields.texts("turns")[0]
    answer = fields.text("answer") if fields.has("answer") else fields.texts("reference")[0]
    prompt = f"{_GSM8K_EXAMPLES}Question: {question}\nAnswer:"
    if chat:
        prompt = f"{question}\n\nThink step by step, and end with #### and the answer as a number."
    return Problem(
        task="gsm8k",
        id=name,
        turns=(prompt,),
        metric="final_answer",
        references=(_result(fields, answer),),
    )


def _result(fields: Fields, answer: str) -> str:
    result = arithmetic.final_answer(answer)
    if result is None:
        raise fields.error("its answer does not end in #### and a whole number: give one.")
    return str(result)


def _humaneval(fields: Fields, name: str, chat: bool) -> Problem:
    """The MARS release keeps the prompts without their tests, which leaves nothing to score."""
    if fields.has("turns"):
        return Problem(task="humaneval", id=name, turns=(fields.texts("turns")[0],))
    prompt = fields.text("prompt")
    return Problem(
        task="humaneval",
        id=name,
        turns=(f"Complete the code I provided.\n\n{prompt}" if chat else prompt,),
        metric="pass@1",
        code=Code(prompt, entry := fields.text("entry_point"), f"{fields.text('test')}\n\ncheck({entry})\n"),
    )


def _mbpp(fields: Fields, name: str, chat: bool) -> Problem:
    """The prompt of Austin et al. 2108.07732, without examples; both the full and the sanitized files."""
    tests = fields.texts("test_list")
    setup = [*fields.texts("test_imports", []), fields.values.get("test_setup_code") or ""]
    asked = (
        f"You are an expert Python programmer, and here is your task: {fields.text('prompt', 'text')} "
        "Your code should pass these tests:\n\n" + "\n".join(tests)
    )
    return Problem(
        task="mbpp",
        id=name,
        turns=(asked if chat else f"{asked}\n[BEGIN]\n",),
        metric="pass@1",
        code=Code("", "", "\n".join([*setup, *tests]) + "\n"),
    )


def _turns(task: str, metric: str = "none") -> _Reader:
    """A reader of the MARS release's layout. References that nothing is compared with are left in the file."""

    def reader(fields: Fields, name: str, chat: bool) -> Problem:
        return Problem(
            task=task,
            id=name,
            turns=tuple(fields.texts("turns")),
            metric=metric,
            references=tuple(fields.texts("reference")) if metric != "none" else (),
        )

    return reader


_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH = {
    "translation": _turns("spec_bench/translation", "bleu"),
    "summarization": _turns("spec_bench/summarization", "rouge_l"),
    "qa": _turns("spec_bench/qa"),
    "rag": _turns("spec_bench/rag"),
} | dict.fromkeys(_MT_BENCH, _turns("spec_bench/mt_bench"))


def _spec_bench(fields: Fields, name: str, chat: bool) -> Problem:
    """Its six parts are tasks of their own. Its math questions ask for no form, so the last number counts."""
    category = fields.text("category")
    if category == "math_reasoning":
        return Problem(
            task="spec_bench/math_reasoning",
            id=name,
            turns=tuple(fields.texts("turns")),
            metric="last_number",
            references=(_result(fields, fields.texts("reference")[0]),),
        )
    if category not in _SPEC_BENCH:
        raise fields.error(f"category is '{category}', which Spec-Bench has not: check the file.")
    return _SPEC_BENCH[category](fields, name, chat)


def _jsonl(fields: Fields, name: str, chat: bool) -> Problem:
    """Anybody's prompts: `prompt` or `turns`, and where they are scored `metric` and `reference`."""
    metric = fields.values.get("metric", "none")
    if metric not in (known := ("none", "final_answer", "last_number", "rouge_l", "bleu")):
        raise fields.error(f"metric is {metric!r}: expected one of {', '.join(known)}.")
    references = fields.texts("reference") if metric != "none" else []
    if metric in ("final_answer", "last_number") and not re.fullmatch(r"-?\d+", references[0].strip()):
        raise fields.error(f"reference is {references[0]!r}: expected a whole number, as {metric} compares.")
    return Problem(
        task="jsonl",
        id=name,
        turns=tuple(fields.texts("turns")) if fields.has("turns") else (fields.text("prompt"),),
        metric=metric,
        references=tuple(r.strip() for r in references),
    )


_READERS: dict[str, _Reader] = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "mt_bench": _turns("mt_bench"),
    "alpaca": _turns("alpaca"),
    "cnn_dm": _turns("cnn_dm", "rouge_l"),
    "wmt19": _turns("wmt19", "bleu"),
    "spec_bench": _spec_bench,
    "jsonl": _jsonl,
}
TASKS = ("stories", "arithmetic", *_READERS)
"""Names that `read` takes."""
