"""Write colab/*.ipynb from colab/*.py, with a common install section, the badge, and Colab's runtime settings.

    python -m scripts.tools.notebooks              # keeps the outputs of unchanged cells
    python -m scripts.tools.notebooks --run NAME   # runs one from end to end, and stores its outputs

The URLs of the package and of the badge are derived from `Repository` in `[project.urls]` of pyproject.toml. Without
this entry, notebooks have no badge, and install the wheel or the URL that the user provides. The script needs the
extra `notebook`.

Tests: tests/test_colab.py.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from scripts import common
from scripts.tools import site_pages

COLAB = common.ROOT / "colab"
INSTALL = """# ## Install
#
# Upload a wheel next to this notebook (`pip wheel --no-deps .` in a checkout builds one), or set `SOURCE` to the path
# of a wheel or to a URL such as `git+https://HOST/OWNER/mars-jax`. The package is never installed from PyPI. The
# extras install the matching libtpu on a TPU, and CUDA on a GPU. If pip replaced a version of JAX that was already
# loaded, restart the session. Expect a minute.

# %%
import glob
import importlib.util
import subprocess
import sys

SOURCE = "ADDRESS"  # @param {type:"string"}

on_tpu, on_gpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*"), glob.glob("/dev/nvidia0")
if importlib.util.find_spec("mars_jax") is None:
    source = (sorted(glob.glob("mars_jax-*.whl")) or [SOURCE])[-1]
    if "://" not in source and not (source.endswith(".whl") and glob.glob(glob.escape(source))):
        print("Upload a wheel of mars-jax, or set SOURCE to the path of a wheel or a Git address.")
    else:
        extras = "train,evaluate" + (",tpu" if on_tpu else ",cuda" if on_gpu else "")
        address = f"mars-jax[{extras}] @ {source}" if "://" in source else f"{source}[{extras}]"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", address], check=True)

"""
"""The install section of every notebook."""
RUNTIME = {"accelerator": "TPU", "colab": {"gpuType": "V5E1", "provenance": []}}
"""Colab's runtime settings. Every notebook also runs on a CPU."""


def installing(source: str) -> str:
    """Return the source of a notebook with its install section replaced by the common one."""
    address = site_pages.repository()
    install = INSTALL.replace("ADDRESS", f"git+{address}" if address else "")
    text, count = re.subn(r"^# ## Install\n.*?check=True\)\n\n", lambda _: install, source, flags=re.M | re.S)
    if count != 1:
        raise ValueError(f"{count} parts are named Install: expected one.")
    return text


def notebook(name: str, old: Any = None) -> Any:
    """Return the notebook of colab/NAME.py. Cells with unchanged code keep their outputs from `old`."""
    import jupytext

    new = jupytext.read(COLAB / f"{name}.py")
    new.metadata |= RUNTIME
    if address := site_pages.repository().removeprefix("https://"):
        badge = "https://colab.research.google.com/assets/colab-badge.svg"
        path = f"{address.replace('.com', '')}/blob/main/colab/{name}.ipynb"
        link = f"https://colab.research.google.com/{path}"
        title, body = new.cells[0].source.split("\n", 1)
        new.cells[0].source = f"{title}\n\n[![Open in Colab]({badge})]({link})\n{body}"
    old_cells = {cell.source: cell for cell in (old.cells if old else [])}
    for number, cell in enumerate(new.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code" and cell.source in old_cells:
            cell.outputs = old_cells[cell.source].outputs
            cell.execution_count = old_cells[cell.source].execution_count
    return new


def run(book: Any) -> None:
    """Run a notebook in an empty folder, and print the time of each cell, so that the text can state how long it takes.

    Output on stderr, which is mostly progress, is discarded.
    """
    import nbclient

    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(book, timeout=None, coalesce_streams=True, resources=resources).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            times = cell.metadata.pop("execution")
            began, ended = (datetime.fromisoformat(times[f"iopub.status.{s}"]) for s in ("busy", "idle"))
            print(f"{cell.id}: {(ended - began).total_seconds():.0f} s")
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main(argv: Sequence[str] | None = None) -> None:
    import jupytext

    parser = common.parser(__doc__)
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="notebooks to run")
    names = parser.parse_args(argv).run
    for path in sorted(COLAB.glob("*.py")):
        path.write_text(installing(path.read_text(encoding="utf-8")), encoding="utf-8")
        place = path.with_suffix(".ipynb")
        book = notebook(path.stem, jupytext.read(place) if place.exists() else None)
        if path.stem in names:
            run(book)
        jupytext.write(book, place)


if __name__ == "__main__":
    main()
