"""The notebook: its two files are one, and it runs from end to end on the embedded family."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

COLAB = Path(__file__).parent.parent / "colab"

pytestmark = pytest.mark.filterwarnings("ignore")  # Jupyter's packages warn of themselves


def test_the_notebook_is_its_source():
    source, notebook = (jupytext.read(COLAB / f"quickstart.{end}") for end in ("py", "ipynb"))
    assert [(c.cell_type, c.source) for c in notebook.cells] == [
        (c.cell_type, c.source) for c in source.cells
    ]
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
def test_it_runs_headless_and_draws_its_plots(monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PROBLEMS", "4")
    monkeypatch.setenv("PYTHONPATH", str(COLAB.parent))
    notebook = jupytext.read(COLAB / "quickstart.ipynb")
    nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert "tau" in said and "####" in said and "theta 0.7" in said
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("#268bd2" in data.get("text/html", "") for data in shown)
    [picture] = [data["image/png"] for data in shown if "image/png" in data]
    (tmp_path / "plot.png").write_bytes(base64.b64decode(picture))
    assert (tmp_path / "plot.png").stat().st_size > 20_000
