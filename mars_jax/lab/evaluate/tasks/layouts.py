"""Readers that turn rows of published question sets into problems. Oracle: hand-written rows in test_tasks.py.

The question sets of the MARS release and Spec-Bench have `question_id`, `category`, `turns` and `reference`. GSM8K,
HumanEval, MBPP, MT-Bench, Alpaca, CNN/DailyMail and WMT19 can also be read in their original layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mars_jax.lab.evaluate.scoring.scores import final_answer
from mars_jax.lab.evaluate.tasks.jsonl import Fields
from mars_jax.lab.evaluate.tasks.problems import UNJUDGED, Code, Problem

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
    """Read a row of GSM8K. A plain prompt starts with two worked examples of our own, which show the format."""
    question = fields.text("question") if fields.has("question") else fields.texts("turns")[0]
    answer = fields.text("answer") if fields.has("answer") else fields.texts("reference")[0]
    if not chat:
        prompt = f"{_GSM8K_EXAMPLES}Question: {question}\nAnswer:"
    else:
        prompt = f"{question}\n\nThink step by step, and end with #### and the answer as a number."
    references = (_result(fields, answer),)
    return Problem(task="gsm8k", id=name, turns=(prompt,), metric="final_answer", references=references)


def _result(fields: Fields, answer: str) -> str:
    answer_number = final_answer(answer)
    if answer_number is None:
        raise fields.error("its answer does not end in #### and a whole number: give one.")
    return str(answer_number)


def _humaneval(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of HumanEval. The MARS release keeps the prompts without their tests, so its rows are not scored."""
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
    """Read a row of a full or sanitized MBPP file, with the prompt of Austin et al. 2108.07732 without examples."""
    tests = fields.texts("test_list")
    # The full files have setup code, and the sanitized ones imports, which are often an empty list.
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
    """Read article and highlights of a CNN/DailyMail row, with the prompt of the MARS release."""
    prompt, reference = f"Summarize: {fields.text('article')}", fields.text("highlights")
    return Problem(task="cnn_dm", id=name, turns=(prompt,), metric="rouge_l", references=(reference,))


_LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "fi": "Finnish", "fr": "French", "gu": "Gujarati",
    "kk": "Kazakh", "lt": "Lithuanian", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip


def _wmt19(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a sentence in two languages. Translate into English if one of them is English."""
    texts = fields.values.get("translation")
    if not isinstance(texts, dict) or len(texts) != 2 or not all(isinstance(t, str) for t in texts.values()):
        raise fields.error("it has neither turns nor a translation of two languages: give one.")
    # Models answer best in English, and the published figures are for translation into English.
    # False sorts before True, so English comes second, as the language to translate into.
    (source, text), (target, reference) = sorted(texts.items(), key=lambda item: item[0] == "en")
    language_pair = f"{_LANGUAGES.get(source, source)} text to {_LANGUAGES.get(target, target)}"
    prompt = f"Translate the following {language_pair}.\n\n{text}"
    return Problem(task="wmt19", id=name, turns=(prompt,), metric="bleu", references=(reference,))


def _references(fields: Fields, metric: str) -> list[str]:
    """Return the references. They are read only if the metric compares answers with them."""
    if metric in UNJUDGED:
        return []
    return fields.texts("reference")


def _turns(task: str, metric: str = "likelihood", otherwise: Reader | None = None) -> Reader:
    """Return a reader of the MARS release's layout. Rows without `turns` go to `otherwise`."""

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
    "translation": _turns("spec_bench/translation", "bleu"),
    "summarization": _turns("spec_bench/summarization", "rouge_l"),
    "qa": _turns("spec_bench/qa"),
    "rag": _turns("spec_bench/rag"),
} | dict.fromkeys(_MT_BENCH, _turns("spec_bench/mt_bench"))


def _spec_bench(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a row of one of the six parts, each a task. Math sets no answer format, so the last number counts."""
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
        raise fields.error(f"category is '{category}', which is no category of Spec-Bench: check the file.")
    return _SPEC_BENCH[category](fields, name, chat)


def _jsonl(fields: Fields, name: str, chat: bool) -> Problem:
    """Read a user's prompt: `prompt` or `turns`, and `metric` and `reference` if it is scored."""
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
    "mt_bench": _turns("mt_bench", otherwise=_mt_bench),
    "alpaca": _turns("alpaca", otherwise=_alpaca),
    "cnn_dm": _turns("cnn_dm", "rouge_l", _cnn_dm),
    "wmt19": _turns("wmt19", "bleu", _wmt19),
    "spec_bench": _spec_bench,
    "jsonl": _jsonl,
}
"""Readers, keyed by task."""
