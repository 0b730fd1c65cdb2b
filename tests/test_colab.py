"""The notebooks: both files of each are equal, and they run from end to end on the embedded family."""

import base64
import os
import re
from pathlib import Path

import numpy as np
import pytest

from scripts.tools import notebooks

jupytext = pytest.importorskip("jupytext")

COLAB = Path(__file__).parent.parent / "colab"

pytestmark = pytest.mark.filterwarnings("ignore")  # Jupyter's packages emit warnings


NOTEBOOKS = sorted(path.stem for path in COLAB.glob("*.py"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_is_its_source(name):
    source = (COLAB / f"{name}.py").read_text(encoding="utf-8")
    assert notebooks.installing(source) == source
    notebook, built = jupytext.read(COLAB / f"{name}.ipynb"), notebooks.notebook(name)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in built.cells]
    assert notebook.metadata["accelerator"] == "TPU"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert not re.search(r"/(tmp|home|root|work)/", str(outputs))  # no path of the machine that ran it
    # Outputs come from one run from end to end, or there are none.
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts in ([None] * len(counts), list(range(1, len(counts) + 1)))


def run_notebook(name, monkeypatch, tmp_path, **settings):
    """Return (the printed text, the data of the displayed outputs)."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    kernel = os.environ.get("MARS_JAX_TESTS_KERNEL")  # in an environment with the wheel
    if kernel is None:
        monkeypatch.setenv("PYTHONPATH", str(COLAB.parent))
    else:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook, folder = jupytext.read(COLAB / f"{name}.ipynb"), {"metadata": {"path": str(tmp_path)}}
    kernel = kernel or "python3"
    nbclient.NotebookClient(notebook, timeout=1200, kernel_name=kernel, resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    return text, [output["data"] for output in outputs if "data" in output]


@pytest.mark.slow
def test_rollouts_learn_and_compile_nothing_after_the_first_update(monkeypatch, tmp_path):
    text, displays = run_notebook("rl_rollouts", monkeypatch, tmp_path, UPDATES="8", REFRESH="24")
    updates = [line for line in text.splitlines() if line.startswith("update ")]
    assert len(updates) == 8 and all(line.endswith(" 0 compilations") for line in updates[1:]), text
    rewards = [float(reward) for reward in re.findall(r"reward (\S+),", text)]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, text
    [(stale, refreshed)] = re.findall(r"stale draft (\S+), refreshed (\S+)", text)
    assert ", kept" in text and float(refreshed) > float(stale), text
    assert float(re.search(r"teacher forcing by (\S+)", text)[1]) < 1e-4
    assert "refreshed" in text and any("image/png" in data for data in displays)


@pytest.mark.slow
def test_a_rule_of_ones_own_is_compared(monkeypatch, tmp_path):
    text, displays = run_notebook("your_own_rule", monkeypatch, tmp_path, NEW_TOKENS="24")
    assert "entropy     1.5" in text and "mars       0.9" in text
    assert any("image/png" in data for data in displays)


@pytest.mark.slow
def test_a_pair_of_ones_own_is_planned_and_timed(monkeypatch, tmp_path):
    pytest.importorskip("libtpu")
    text, _ = run_notebook("your_own_pair", monkeypatch, tmp_path, NEW_TOKENS="16")
    assert "v5e" in text and "fits" in text, text
    assert len(re.findall(r"] tokens/s", text)) == 4 and "4 of 4 texts" in text, text


@pytest.mark.slow
def test_a_head_is_distilled_and_drafts(monkeypatch, tmp_path):
    text, displays = run_notebook("distill_a_head", monkeypatch, tmp_path, TOKENS="8192", WRITE="16")
    taus = dict(re.findall(r"(\S+) +tau (\S+), 4 of 4 texts", text))
    assert set(taus) == {"ngram", "eagle:head", "eagle:tiny/eagle3"} and float(taus["eagle:head"]) >= 1
    assert any("image/png" in data for data in displays)


@pytest.mark.slow
def test_mars_is_reproduced_on_the_pair_that_fits(monkeypatch, tmp_path):
    settings = {"PROBLEMS": "4", "LENGTHS": "3", "CHECK": "0", "OUTPUT": str(tmp_path / "out")}
    text, displays = run_notebook("reproduce_mars", monkeypatch, tmp_path, **settings)
    assert "recipe: embedded" in text and len(re.findall(r"arithmetic: mars theta=.* tau .*score", text)) == 4
    assert any("image/png" in data for data in displays)
    pages = "".join(data.get("text/markdown", "") for data in displays)
    assert "| strict -> relaxed | measured | published |" in pages and "over the best lossless" in pages


@pytest.mark.slow
def test_meshes_give_the_texts_of_one_device(monkeypatch, tmp_path):
    text, _ = run_notebook("mesh", monkeypatch, tmp_path, NEW_TOKENS="16")
    assert text.count("4 of 4 texts are those of one device") == 2


@pytest.mark.slow
def test_it_runs_headless_and_draws_its_plots(monkeypatch, tmp_path):
    text, displays = run_notebook("quickstart", monkeypatch, tmp_path, PROBLEMS="4")
    assert "tau" in text and "####" in text and "theta 0.7" in text
    assert any("#268bd2" in data.get("text/html", "") for data in displays)
    [picture] = [data["image/png"] for data in displays if "image/png" in data]
    assert len(base64.b64decode(picture)) > 20_000
