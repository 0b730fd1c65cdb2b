"""The Python of the pages in docs/, run block after block; and the figures that pages repeat."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if "\n```python\n" in path.read_text())
"""Every page with Python in it."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, monkeypatch):
    # Users have JAX's own defaults.
    import jax

    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    try:
        blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
        assert len(blocks) > 1
        names: dict = {"__name__": "page"}
        for number, block in enumerate(blocks, start=1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    finally:
        jax.config.update("jax_numpy_rank_promotion", "raise")
        jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_the_first_block_of_the_rules_is_a_whole_file(tmp_path):
    text = (DOCS / "rules.md").read_text()
    first = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert len(first.strip().splitlines()) < 30
    names: dict = {"__name__": "entropy_gate"}
    exec(first, names)
    assert names["entropy_gate"](0.5).entropy == 0.5


def test_there_are_pages_with_python():
    assert {"rules.md", "drafters.md", "embedding.md", "bridges.md", "rollouts.md"} <= set(PAGES)
    assert {"start.md", "choosing.md", "faq.md", "tpu.md"} <= set(PAGES)


@pytest.mark.parametrize("page", ["choosing.md", "faq.md"])
def test_the_figures_that_a_page_repeats_are_those_of_the_results(page):
    """Those with two or three decimals; the pages of results are written from the JSON."""
    results = "".join((DOCS / name).read_text() for name in ("results.md", "rules-compared.md"))
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    settings = r"(?:theta|mass)=[\d.]+"  # what is asked for, and not what was measured
    figures = set(re.findall(r"(?<![\d.])[+-]?\d+\.\d{2,3}(?![\d.])", re.sub(settings, "", text)))
    measured = set(re.findall(r"(?<![\d.])[+-]?\d+\.\d{2,3}(?![\d.])", results))
    assert figures and sorted(figures - measured) == []
