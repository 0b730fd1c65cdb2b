"""The Python of the pages in docs/, run block by block, and the figures that pages repeat."""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

import mars_jax
from mars_jax.cli.generate.arguments import parser
from tests.helpers.pages import PAGES, ROOT, blocks

DOCS = ROOT / "docs"
MANY = DOCS / "many-machines.md"
NAMES = [path.name for path in PAGES if path.parent == DOCS and path != MANY]
"""Every page of docs/ with Python in it, except the one that needs Ray."""


@pytest.mark.slow
@pytest.mark.parametrize("page", NAMES)
def test_the_code_of_a_page_runs(page, monkeypatch):
    # Users run with JAX's defaults.
    import jax

    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    try:
        names: dict = {"__name__": "page"}
        for number, block in enumerate(blocks(DOCS / page), start=1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    finally:
        jax.config.update("jax_numpy_rank_promotion", "raise")
        jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.mark.slow
def test_the_block_about_ray_gives_the_texts_of_one_process(tmp_path):
    pytest.importorskip("ray")
    [block] = re.findall(r"^```python\n(.*?)^```$", MANY.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(block)
    prompts = [f"Once upon a time {i}" for i in range(6)]
    lines = [json.dumps({"id": i, "prompt": prompt}) for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    environment = os.environ | {"PYTHONPATH": str(DOCS.parent), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("XLA_FLAGS")
    with tempfile.TemporaryDirectory() as short:  # pytest's paths are too long for Ray's sockets
        environment["RAY_TMPDIR"] = short
        subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment, check=True)
    text = "".join(file.read_text() for file in (tmp_path / "out").iterdir())
    rows = sorted((json.loads(line) for line in text.splitlines()), key=lambda row: row["id"])
    result = mars_jax.generate(mars_jax.load("tiny/target"), "ngram", prompts, max_new_tokens=8)
    assert [row["tokens"] for row in rows] == result.tokens
    assert [row["text"] for row in rows] == result.text


def test_the_jobs_of_schedulers_are_commands_that_there_are():
    """Their flags exist, and there are as many parts as pods."""
    yaml = pytest.importorskip("yaml")
    text = MANY.read_text()
    [job] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    spec = yaml.safe_load(job)["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    slurm = re.search(r"^mars-jax (generate .*--part \$PART.*)$", text, re.MULTILINE)
    values = {"$(JOB_COMPLETION_INDEX)": "3", "$SLURM_ARRAY_TASK_ID": "3", "$PART": "3/16"}
    for command in (container["args"], slurm[1].split()):
        words = [re.sub(r"\$\(?\w+\)?", lambda name: values[name[0]], word) for word in command]
        arguments = parser().parse_args(words[1:])
        assert words[0] == "generate" and arguments.resume and "part-3" in str(arguments.output)
        assert arguments.part == slice(3, None, spec["completions"])
    assert spec["parallelism"] <= spec["completions"]


@pytest.mark.parametrize("page", ["choosing.md", "faq.md"])
def test_the_figures_that_a_page_repeats_are_those_of_the_results(page):
    """Compare figures with two or three decimals."""
    card = DOCS.parent / "mars_jax" / "assets" / "tiny" / "README.md"
    results = "".join(
        path.read_text() for path in (*DOCS.glob("rules-compared*.md"), DOCS / "results.md", card)
    )
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    settings = r"(?:theta|mass)=[\d.]+"  # settings, not measurements
    figures = set(re.findall(r"(?<![\d.])[+-]?\d+\.\d{2,3}(?![\d.])", re.sub(settings, "", text)))
    measured = set(re.findall(r"(?<![\d.])[+-]?\d+\.\d{2,3}(?![\d.])", results))
    assert figures and sorted(figures - measured) == []
