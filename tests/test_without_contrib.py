"""The library's rules and drafters and the README's Python work where `mars_jax.contrib` cannot be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import pathlib, sys

sys.modules["mars_jax.contrib"] = None  # an import raises an error

import mars_jax as mj
from tests.helpers.pages import blocks

for block in blocks(pathlib.Path("README.md")):
    exec(compile(block, "README.md", "exec"), globals())

small = {"num_draft_tokens": 2, "dtype": "float32"}
for name in ("exact", "rejection", "mars", "adaptive", "mixture", "nucleus", "topk", "typical"):
    rule = mj.verify.load(name, target)
    draft = mj.drafters.load("model:tiny/draft", target, sample=mj.verify.needs_q(rule.rule), **small)
    assert len(mj.generate(target, draft, ["A cat"], verify=rule, max_new_tokens=4).tokens[0]) == 4
for name in ("none", "ngram", "eagle:tiny/eagle3"):
    options = {} if name == "none" else {"num_draft_tokens": 2}
    draft = mj.drafters.load(name, target, **options)
    assert len(mj.generate(target, draft, ["A cat"], max_new_tokens=4).tokens[0]) == 4
assert not [name for name in sys.modules if name.startswith("mars_jax.contrib.")]
try:
    mj.verify.load("fly", target)
except ModuleNotFoundError as error:
    assert "mars_jax.contrib" in str(error)
else:
    raise AssertionError("a rule of contrib was found")
print("done")
"""


@pytest.mark.slow
def test_the_library_works_without_contrib():
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stderr
