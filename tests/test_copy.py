"""A copy of the package with a new rule, drafter and setting, made only in the files that CONTRIBUTING names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RULE = '''"""Acceptance within a gap. B batch, N nodes. Oracle: the suite of all rules, tests/verify/test_rules.py."""

from __future__ import annotations

from typing import Any

from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence
from mars_jax.verify import drafted
from mars_jax.verify.definition import register
from mars_jax.verify.ranges import NATS, nats
from mars_jax.verify.relaxed import Relaxed


@register("within", paper="none")
@struct.dataclass(kw_only=True)
class Within(Relaxed):
    """Also accept tokens within a gap of the target's best token.

    >>> within(nats=0.2).name
    'within'
    """

    # f32[] or [B]
    nats: Any = struct.setting(
        default=0.5, ranges=nats("a finite number of at least 0", NATS), help="the gap; 0 never relaxes"
    )

    def relaxable(self, evidence: Evidence) -> Array:
        return drafted.shortfall(evidence) < self.nats[:, None]


within = Within
'''
RULE_CASE = """    "within": Case(contrib.within(nats=1.5), verify.exact(), {"nats": 0.0}, {"nats": 0.4}, drafter=TREE),
"""
DRAFTER = '''"""Repetition of the last token. B batch. Oracle: autoregression, in the matrix of all drafters."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import DraftTree, Params, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.registry import register


@dataclasses.dataclass(frozen=True)
class Repeat(Drafter):
    """Draft repetitions of the last token."""

    num_draft_tokens: int = 4

    resizes = True

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        return chain(jnp.repeat(last_token(inputs), self.num_nodes, axis=1)), state


def load_repeat(asked: Asked) -> LoadedDrafter:
    """Load `Repeat` with the requested length."""
    return LoadedDrafter(Repeat(asked.chain), ())


register("repeat", Repeat, load_repeat)
'''

SETTING = """    heat: float = setting(
        default=1.0,
        ranges=Range("a number above 0", 0, above=True),
        help="multiply the temperature by X (default: 1)",
    )
"""


def insert(path: Path, text: str, *, anchor: str) -> None:
    """Insert a text before the first occurrence of `anchor`."""
    source = path.read_text()
    assert anchor in source, path
    path.write_text(source.replace(anchor, text + anchor, 1))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a copy of the checkout with a new rule and its case, and a new drafter."""
    folder = tmp_path_factory.mktemp("copy") / "mars-jax"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=ignored)
    package = folder / "mars_jax"
    (package / "contrib/rules/within.py").write_text(RULE)
    insert(folder / "tests/verify/test_rules.py", RULE_CASE, anchor='    "budget": Case(')
    (package / "contrib/drafters/repeat.py").write_text(DRAFTER)
    settings = package / "utils/settings.py"
    [comment] = re.findall(r"(?:    # .*\n)+(?=    top_k: int)", settings.read_text())
    insert(settings, SETTING, anchor=comment)
    insert(package / "serve/requests.py", "    heat: Each[float]\n", anchor="    top_k: Each[int]")
    insert(package / "serve/generation.py", "        heat,\n", anchor="        top_k, top_p, min_p")
    prepared = package / "serve/prepare.py"
    prepared.write_text(prepared.read_text().replace("[r.temperature for", "[r.temperature * r.heat for"))
    return folder


def run(copy: Path, *arguments: str) -> str:
    """Run a program of the copy and return its output; fail if the program fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(copy)
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    return process.stdout


@pytest.mark.slow
def test_the_command_line_has_both(copy):
    rules = json.loads(run(copy, "-m", "mars_jax.generate", "--list-rules", "--json"))
    assert "within" in [row["name"] for row in rules]
    flags = "--draft repeat --verify within --rule-option nats=1.0 --json --max-new-tokens 8"
    output = run(copy, "-m", "mars_jax.generate", *flags.split(), "the sea")
    [row] = [json.loads(line) for line in output.splitlines()]
    assert len(row["tokens"]) == 8 and row["run"]["draft"] == "repeat"


@pytest.mark.slow
def test_a_setting_of_requests_is_a_flag_a_key_and_an_argument(copy):
    def tokens(*words: str) -> list[list[int]]:
        flags = ["--json", "--max-new-tokens", "8", "--verify", "exact", *words]
        output = run(copy, "-m", "mars_jax.generate", *flags)
        return [json.loads(line)["tokens"] for line in output.splitlines()]

    assert "--heat X" in run(copy, "-m", "mars_jax.generate", "--help-all")
    rows = [
        {"prompt": "the sea"} | options
        for options in ({"temperature": 1.5}, {"temperature": 0.5, "heat": 3.0})
    ]
    file = copy / "prompts.jsonl"
    file.write_text("".join(json.dumps(row | {"seed": 4}) + "\n" for row in rows))
    [hot] = tokens("--temperature", "0.5", "--heat", "3", "--seed", "4", "the sea")
    assert tokens("--prompts-file", str(file)) == [hot, hot]
    code = "import mars_jax as mj; print(mj.generate(mj.load(), 'none', 'the sea', max_new_tokens=8, "
    code += "temperature=0.5, heat=3.0, seed=4).tokens)"
    assert json.loads(run(copy, "-c", code)) == [hot]


@pytest.mark.slow
def test_the_suite_of_all_rules_the_tables_the_documents_and_what_is_public(copy):
    files = ("verify/test_rules", "test_tables", "test_public", "test_docs", "test_features", "test_architecture",
             "cli/test_commands", "cli/test_arguments", "serve/test_options")  # fmt: skip
    run(copy, "tests/test_public.py")  # lists the new field of `Request`
    output = run(copy, "-m", "pytest", "-q", "-m", "not slow", *(f"tests/{name}.py" for name in files))
    assert " passed" in output and "failed" not in output
