"""The Python of docs/rules.md, drafters.md and embedding.md, run as it stands, block after block in one namespace."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["rules.md", "drafters.md", "embedding.md"])
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
