"""Rows of --json and --output match docs/rows.md: every key, its type, and when it is present."""

import json
import re
from pathlib import Path

import pytest

from mars_jax import __version__

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rows.md"
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
    "any": object,
}


def schema(heading):
    """Return {key: (types, when the key is present)} from the table of a section."""
    sections = re.split(r"^#+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [text] = [section for section in sections if section.startswith(heading + "\n")]
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    return {key: (tuple(TYPES[name] for name in types.split(" or ")), when) for key, types, when in rows}


def check(row, heading):
    documented = schema(heading)
    assert set(row) <= set(documented)
    for key, (types, when) in documented.items():
        assert key in row or when != "always", key
        if key in row:
            assert any(isinstance(row[key], kind) for kind in types), key
            # True is an int in Python but not a number in JSON.
            assert not isinstance(row[key], bool) or bool in types or object in types, key


def test_rows_are_those_of_the_page(run, target, tmp_path):
    prompts = tmp_path / "p.jsonl"
    sampled = {"prompt": "the sea", "id": "a", "theta": 0.5, "temperature": 0.5, "seed": 7}
    prompts.write_text(json.dumps(sampled) + '\n{"prompt_tokens": [1, 2], "strict": true}\n')
    flags = "--draft ngram --verify mars --max-new-tokens 8 --num-draft-tokens 3 --seed 3 --json --log-probs"
    outcome = run("--target", target, "--prompts-file", prompts, *flags.split())
    assert outcome.code == 0, outcome.err
    first, second = map(json.loads, outcome.out.splitlines())
    for row in (first, second):
        check(row, "Rows")
        check(row["sampling"], "sampling")
        check(row["run"], "run")
        expected = {"version": __version__, "target": str(target), "draft": "ngram", "verify": "mars"}
        expected |= {"dtype": "float32", "num_draft_tokens": 3, "tree": None}
        assert row["run"] == row["run"] | expected
    assert first["run"]["settings"] == {**second["run"]["settings"], "theta": 0.5}
    assert second["run"]["settings"]["theta"] == pytest.approx(0.9)
    assert first["run"]["settings"].keys() == {"base", "margin", "theta", "max_relaxed_run", "exact_prefix"}
    # The seed of the row; or --seed plus the row number.
    assert (first["sampling"]["seed"], second["sampling"]["seed"]) == (7, 4)
    assert (first["sampling"]["temperature"], first["sampling"]["strict"]) == (0.5, False)
    assert second["sampling"]["strict"] is True
