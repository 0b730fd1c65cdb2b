"""Catalogue of tasks: problems from the package, from local files, or from datasets on the Hub or in a local folder.

The question sets of the MARS release and Spec-Bench have the fields `question_id`, `category`, `turns` and `reference`.
GSM8K, HumanEval, MBPP, MT-Bench, Alpaca, CNN/DailyMail and WMT19 can also be read in their original layouts. Tested
against folders read directly with `datasets` (tests/lab/evaluate/test_datasets.py) and against hand-written rows
(test_tasks.py).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mars_jax.lab.evaluate.scoring import final_answer
from mars_jax.lab.evaluate.tasks.jsonl import Fields, read_jsonl
from mars_jax.lab.evaluate.tasks.problems import UNJUDGED, Code, Problem
from mars_jax.lab.training.data import documents
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.limits import DATASET_FILES
from mars_jax.utils.paths import check_path
from mars_jax.utils.types import JsonObject

Reader = Callable[[Fields, str, bool], Problem]
"""`(row, id, chat) -> problem`."""

_GSM8K_EXAMPLES = """\
Question: A box holds 12 pencils. Mia buys 3 boxes and gives 5 pencils away. How many pencils does she have left?
Answer: Mia buys 3 * 12 = 36 pencils. She has 36 - 5 = 31 pencils left.
#### 31

Question: A train goes 60 miles an hour for 2 hours and then 40 miles more. How many miles does it go in all?
Answer: In 2 hours the train goes 2 * 60 = 120 miles. In all it goes 120 + 40 = 160 miles.
#### 160

"""


def _gsm8k(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of GSM8K. A plain prompt starts with two worked examples of our own, which show the answer format."""
    question = fields.first_text("question", "turns")
    answer = fields.first_text("answer", "reference")
    if not chat:
        prompt = f"{_GSM8K_EXAMPLES}Question: {question}\nAnswer:"
    else:
        prompt = f"{question}\n\nThink step by step, and end with #### and the answer as a number."
    references = (_final_number(fields, answer),)
    return Problem(task="gsm8k", id=name, turns=(prompt,), metric="final_answer", references=references)


def _final_number(fields: Fields, answer: str) -> str:
    answer_number = final_answer(answer)
    if answer_number is None:
        raise fields.error("its answer does not end in #### and a whole number: give one.")
    return str(answer_number)


def _humaneval(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of HumanEval. The MARS release contains prompts but no tests, so its rows are not scored."""
    if fields.has("turns"):
        return Problem(task="humaneval", id=name, turns=(fields.texts("turns")[0],))
    prompt = fields.text("prompt")
    return Problem(
        task="humaneval",
        id=name,
        turns=(f"Complete the code I provided.\n\n{prompt}" if chat else prompt,),
        metric="pass@1",
        code=Code(prompt, fields.text("entry_point"), fields.text("test")),
    )


def _mbpp(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of a full or sanitized MBPP file, with the zero-shot prompt of Austin et al. 2108.07732."""
    tests = fields.texts("test_list")
    # Full files contain setup code. Sanitized files contain a list of imports, which is often empty.
    setup_lines = [fields.values.get("test_setup_code") or ""]
    if fields.values.get("test_imports"):
        setup_lines = [*fields.texts("test_imports"), *setup_lines]
    prompt = (
        f"You are an expert Python programmer, and here is your task: {fields.text('prompt', 'text')} "
        "Your code should pass these tests:\n\n" + "\n".join(tests)
    )
    return Problem(
        task="mbpp",
        id=name,
        turns=(prompt if chat else f"{prompt}\n[BEGIN]\n",),
        metric="pass@1",
        # The assertions run at the top level. HumanEval's evaluator then calls `check(None)`.
        code=Code("", "None", "\n".join([*setup_lines, *tests, "", "def check(function):", "    pass", ""])),
    )


def _mt_bench(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of MT-Bench whose turns are under `prompt`."""
    return Problem(task="mt_bench", id=name, turns=tuple(fields.texts("prompt")), metric="likelihood")


def _alpaca(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of Alpaca, with instruction and input joined into one prompt."""
    prompt_parts = [fields.text("instruction")]
    if fields.values.get("input"):
        prompt_parts.append(fields.text("input"))
    return Problem(task="alpaca", id=name, turns=("\n\n".join(prompt_parts),), metric="likelihood")


def _cnn_dm(fields: Fields, name: str, chat: bool) -> Problem:
    """Read the article and the highlights of a CNN/DailyMail row. The prompt comes from the MARS release."""
    prompt, reference = f"Summarize: {fields.text('article')}", fields.text("highlights")
    return Problem(task="cnn_dm", id=name, turns=(prompt,), metric="rouge_l", references=(reference,))


_LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "fi": "Finnish", "fr": "French", "gu": "Gujarati",
    "kk": "Kazakh", "lt": "Lithuanian", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip


def _wmt19(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of WMT19: one text in two languages. If one is English, the task is to translate into English."""
    texts = fields.values.get("translation")
    if not isinstance(texts, dict) or len(texts) != 2 or not all(isinstance(t, str) for t in texts.values()):
        raise fields.error("it has neither turns nor a translation of two languages: give one.")
    # Models answer best in English, and the published figures are for translation into English. False sorts before
    # True, so English comes second, as the target language.
    (source, text), (target, reference) = sorted(texts.items(), key=lambda item: item[0] == "en")
    language_pair = f"{_LANGUAGES.get(source, source)} text to {_LANGUAGES.get(target, target)}"
    prompt = f"Translate the following {language_pair}.\n\n{text}"
    return Problem(task="wmt19", id=name, turns=(prompt,), metric="bleu", references=(reference,))


def _references(fields: Fields, metric: str) -> list[str]:
    """Return the reference answers, or no references if the metric does not use them."""
    if metric in UNJUDGED:
        return []
    return fields.texts("reference")


def _release_reader(task: str, metric: str = "likelihood", otherwise: Reader | None = None) -> Reader:
    """Return a reader for the layout of the MARS release. Rows without `turns` are passed to `otherwise`."""

    def reader(fields: Fields, name: str, chat: bool) -> Problem:
        if otherwise is not None and not fields.has("turns"):
            return otherwise(fields, name, chat)
        return Problem(
            task=task,
            id=name,
            turns=tuple(fields.texts("turns")),
            metric=metric,
            references=tuple(_references(fields, metric)),
        )

    return reader


_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH = {
    "translation": _release_reader("spec_bench/translation", "bleu"),
    "summarization": _release_reader("spec_bench/summarization", "rouge_l"),
    "qa": _release_reader("spec_bench/qa"),
    "rag": _release_reader("spec_bench/rag"),
} | dict.fromkeys(_MT_BENCH, _release_reader("spec_bench/mt_bench"))


def _spec_bench(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of Spec-Bench, whose six parts are separate tasks.

    The math prompts specify no answer format, so the last number of an answer is scored.
    """
    category = fields.text("category")
    if category == "math_reasoning":
        return Problem(
            task="spec_bench/math_reasoning",
            id=name,
            turns=tuple(fields.texts("turns")),
            metric="last_number",
            references=(_final_number(fields, fields.texts("reference")[0]),),
        )
    if category not in _SPEC_BENCH:
        raise fields.error(f"category is '{category}', which is no category of Spec-Bench: check the file.")
    return _SPEC_BENCH[category](fields, name, chat)


def _jsonl(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of a user's file: `prompt` or `turns`, and, if the answer is scored, `metric` and `reference`."""
    metric = fields.values.get("metric", "none")
    if metric not in (metrics := (*UNJUDGED, "final_answer", "last_number", "rouge_l", "bleu")):
        raise fields.error(f"metric is {metric!r}: expected one of {', '.join(metrics)}.")
    references = _references(fields, metric)
    if metric in ("final_answer", "last_number") and not re.fullmatch(r"-?\d+", references[0].strip()):
        raise fields.error(f"reference is {references[0]!r}: expected a whole number, as {metric} compares.")
    return Problem(
        task="jsonl",
        id=name,
        turns=tuple(fields.texts("turns")) if fields.has("turns") else (fields.text("prompt"),),
        metric=metric,
        references=tuple(r.strip() for r in references),
    )


READERS: dict[str, Reader] = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "mt_bench": _release_reader("mt_bench", otherwise=_mt_bench),
    "alpaca": _release_reader("alpaca", otherwise=_alpaca),
    "cnn_dm": _release_reader("cnn_dm", "rouge_l", _cnn_dm),
    "wmt19": _release_reader("wmt19", "bleu", _wmt19),
    "spec_bench": _spec_bench,
    "jsonl": _jsonl,
}
"""Readers, keyed by task."""
TASKS = ("stories", "arithmetic", *READERS)
"""Names that `read_problems` accepts."""
STORY_WORDS = 24
"""Number of words in each prompt of the stories task. Documents with at most twice as many words are skipped."""


def read_problems(
    name: str, path: str | None = None, *, chat: bool, limit: int | None = None
) -> list[Problem]:
    """Return the first `limit` problems of a task, or of each part of Spec-Bench.

    Args:
      name: one of `TASKS`.
      path: path of the task's file, or (except for stories) a Hub dataset as OWNER/NAME[:CONFIG[:SPLIT]]; None for
        arithmetic, whose problems are in the package.
      chat: whether a chat template will format the prompts. The wording of some prompts depends on it.
      limit: maximum number of problems; None for all.

    Raises:
      MarsError: the task is unknown, the file cannot be read, or a line is not a valid problem for the task.

    >>> [problem] = read_problems("arithmetic", chat=True, limit=1)
    >>> problem.metric, problem.references
    ('final_answer', ('33',))
    """
    if name not in TASKS:
        suggestion = did_you_mean(name, TASKS)
        raise MarsError(f"there is no task '{name}'{suggestion}: choose one of {', '.join(TASKS)}.")
    if name == "arithmetic":
        if path is not None:
            raise MarsError("the task arithmetic is in the package and takes no file: leave its path out.")
        return read_arithmetic("eval", limit)
    if not path:
        hub_hint = ""
        if name != "stories":
            hub_hint = f", or {name}=OWNER/DATASET of the Hub"
        raise MarsError(f"the task {name} needs a file: write {name}=PATH{hub_hint}.")
    if name == "stories":
        return list(itertools.islice(_stories(path), limit))
    problems, task_counts = [], Counter[str]()
    rows = read_hub(path, name) if is_hub_name(path) else read_jsonl(path)
    if name != "spec_bench":  # limited per part below
        rows = itertools.islice(rows, limit)
    for number, fields in enumerate(rows):
        problem = READERS[name](fields, str(_id(fields, number)), chat)
        task_counts[problem.task] += 1
        if limit is None or task_counts[problem.task] <= limit:
            problems.append(problem)
    if not problems:
        raise MarsError(f"'{path}' holds no problems: give one object a line.")
    _check(problems, path)
    # List the parts of Spec-Bench one after another, each in file order.
    return [p for task in task_counts for p in problems if p.task == task]


def read_arithmetic(split: str, limit: int | None = None) -> list[Problem]:
    """Return the first `limit` word problems of the split "train" (4,096 problems) or "eval" (1,300 problems).

    scripts/arithmetic/generator.py wrote the files.

    >>> [problem] = read_arithmetic("eval", 1)
    >>> problem.metric, problem.references
    ('final_answer', ('33',))
    """
    path = Path(__file__).with_name(f"arithmetic_{split}.jsonl.xz")
    rows = itertools.islice(read_jsonl(str(path)), limit)
    return [
        Problem(
            task="arithmetic",
            id=str(number),
            turns=(fields.text("question"),),
            metric="final_answer",
            references=(str(final_answer(fields.text("answer"))),),
        )
        for number, fields in enumerate(rows)
    ]


def _id(fields: Fields, number: int) -> str | int:
    for key in ("id", "task_id", "question_id", "prompt_id"):
        value = fields.values.get(key)
        if isinstance(value, str | int):
            return value
    return number


def _check(problems: Sequence[Problem], path: str) -> None:
    # If a task has two metrics, there are more (task, metric) pairs than tasks.
    if len(metrics := {(p.task, p.metric) for p in problems}) > len({task for task, _ in metrics}):
        raise MarsError(f"'{path}' mixes metrics, which cannot be averaged: make one file for each metric.")
    (task, name), count = Counter((p.task, p.id) for p in problems).most_common(1)[0]
    if count > 1:
        raise MarsError(f"'{path}' has {count} problems of {task} with the id {name}: give each its own.")


def _stories(path: str) -> Iterator[Problem]:
    """Yield the first `STORY_WORDS` words of every long document, so that prompts do not depend on a tokenizer."""
    opening_pattern = re.compile(rf"\s*(?:\S+\s+){{{STORY_WORDS - 1}}}\S+")
    has_story = False
    for number, document in enumerate(documents(path)):
        # `maxsplit` limits the work on a long document: the rest of the document counts as one word.
        if len(document.split(maxsplit=2 * STORY_WORDS)) <= 2 * STORY_WORDS:
            continue
        if opening_match := opening_pattern.match(document):
            has_story = True
            yield Problem(
                task="stories", id=str(number), turns=(opening_match[0],), metric="likelihood", continues=True
            )
    if not has_story:
        raise MarsError(
            f"'{path}' has no document of more than {2 * STORY_WORDS} words: give longer ones, divided by lines of "
            "<|endoftext|>."
        )


PARTS = {
    "gsm8k": ("main", "test"),
    "alpaca": (None, "train"),
    "mt_bench": (None, "train"),
    "cnn_dm": ("3.0.0", "test"),
    "wmt19": ("zh-en", "validation"),
    "prompts": (None, "train"),
}
"""Default configs and splits, from the dataset cards of openai/gsm8k, tatsu-lab/alpaca, HuggingFaceH4/mt_bench_prompts,
abisee/cnn_dailymail and wmt/wmt19. Other datasets, such as openai/openai_humaneval and google-research-datasets/mbpp,
default to no config and the split "test". "prompts" applies to the datasets that `mars-jax generate` reads, most of
which have only a train split."""


def is_hub_name(path: str) -> bool:
    """Return whether a path is an existing folder, or is not a file and has the form OWNER/NAME[:CONFIG[:SPLIT]].

    >>> is_hub_name("openai/gsm8k"), is_hub_name("openai/gsm8k:main:test"), is_hub_name("gsm8k_test.jsonl")
    (True, True, False)
    """
    check_path(path)
    file_suffix = re.search(r"\.(jsonl?|ndjson|parquet|txt|csv|tsv|md)(\.(xz|gz))?$", path, re.IGNORECASE)
    folder = Path(path)
    if folder.is_file() or file_suffix:
        return False
    if folder.is_dir():
        return True
    # A missing file in an existing folder is a typo: do not look for it on the Hub.
    if "/" in path and folder.parent.is_dir():
        return False
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", path) is not None


def read_hub(path: str, task: str) -> Iterator[Fields]:
    """Stream the rows of OWNER/NAME[:CONFIG[:SPLIT]] or of a folder. Only the rows that are read are downloaded.

    Args:
      path: a dataset name in this format, or a folder.
      task: determines the config and the split if the name omits them.

    Raises:
      MarsError: `datasets` is not installed or cannot read the dataset.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise MarsError("datasets of the Hub need the package datasets: pip install datasets.") from None
    if Path(path).is_dir():
        _check_entries(path)
        name, config, split = path, "", ""
        suggestion = "give a file of JSON lines"
    else:
        # Missing parts become empty, and then get the defaults of `PARTS`.
        name, config, split = (*path.split(":"), "", "")[:3]
        suggestion = "write OWNER/NAME:CONFIG:SPLIT, or give a local file"
    usual_config, usual_split = PARTS.get(task, (None, "test"))
    try:
        rows = datasets.load_dataset(name, config or usual_config, split=split or usual_split, streaming=True)
        for number, values in enumerate(rows):
            yield Fields(f"{path}, row {number}", dict(values))
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise MarsError(f"the dataset '{path}' cannot be read ({reason}): {suggestion}.") from None


def _check_entries(folder: str) -> None:
    """Raise MarsError for a folder with too many files, such as a home folder: `datasets` would list them all."""
    if any(number >= DATASET_FILES for number, _ in enumerate(Path(folder).rglob("*"))):
        raise MarsError(
            f"the folder '{folder}' holds more than {DATASET_FILES:,} files: name a file, or the folder of one dataset."
        )


def columns(path: str) -> Iterator[tuple[str, JsonObject]] | None:
    """Return the rows of a dataset as (place, columns) for `generate --prompts-file`, or None for any other path.

    Raises:
      MarsError: see `read_hub`.
    """
    if not is_hub_name(path):
        return None
    return ((fields.where, fields.values) for fields in read_hub(path, "prompts"))
