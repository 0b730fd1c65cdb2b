"""Rows of a dataset on the Hugging Face Hub, or of a local folder in its layout, read with the `datasets` library.

Oracle: folders read directly with `datasets`, in tests/lab/evaluate/test_datasets.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mars_jax.lab.evaluate.tasks.jsonl import Fields
from mars_jax.utils.errors import MarsError
from mars_jax.utils.limits import DATASET_FILES
from mars_jax.utils.paths import check_path
from mars_jax.utils.types import JsonObject


class Part(NamedTuple):
    """The default config and split of a task's dataset."""

    config: str | None
    split: str


PARTS = {
    "gsm8k": Part("main", "test"),
    "alpaca": Part(None, "train"),
    "mt_bench": Part(None, "train"),
    "cnn_dm": Part("3.0.0", "test"),
    "wmt19": Part("zh-en", "validation"),
    "prompts": Part(None, "train"),
}
"""Default configs and splits, from the dataset cards of openai/gsm8k, tatsu-lab/alpaca, HuggingFaceH4/mt_bench_prompts,
abisee/cnn_dailymail and wmt/wmt19. Other datasets use no config and the split test, for example
openai/openai_humaneval and google-research-datasets/mbpp. "prompts" is for the datasets that `mars-jax generate` reads,
most of which have only a train split."""


def is_hub_name(path: str) -> bool:
    """Return whether a path is an existing folder, or is not a file and has the form OWNER/NAME[:CONFIG[:SPLIT]].

    >>> is_hub_name("openai/gsm8k"), is_hub_name("openai/gsm8k:main:test"), is_hub_name("gsm8k_test.jsonl")
    (True, True, False)
    """
    check_path(path)
    file_suffix = re.search(r"\.(jsonl?|ndjson|parquet|txt|csv|tsv|md)(\.(xz|gz))?$", path, re.IGNORECASE)
    folder = Path(path)
    if folder.is_file() or file_suffix:
        return False
    if folder.is_dir():
        return True
    # A missing file in an existing folder is a typo: do not look for it on the Hub.
    if "/" in path and folder.parent.is_dir():
        return False
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", path) is not None


def read_hub(path: str, task: str) -> Iterator[Fields]:
    """Stream the rows of OWNER/NAME[:CONFIG[:SPLIT]] or of a folder. Only the rows that are read are downloaded.

    Args:
      path: dataset name or folder, as above.
      task: sets config and split if the name omits them.

    Raises:
      MarsError: `datasets` is not installed or cannot read the dataset.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise MarsError("datasets of the Hub need the package datasets: pip install datasets.") from None
    if Path(path).is_dir():
        _check_entries(path)
        name, config, split = path, "", ""
        suggestion = "give a file of JSON lines"
    else:
        # Missing parts become empty, and then get the defaults of `PARTS`.
        name, config, split = (*path.split(":"), "", "")[:3]
        suggestion = "write OWNER/NAME:CONFIG:SPLIT, or give a local file"
    part = PARTS.get(task, Part(None, "test"))
    try:
        rows = datasets.load_dataset(name, config or part.config, split=split or part.split, streaming=True)
        for number, values in enumerate(rows):
            yield Fields(f"{path}, row {number}", dict(values))
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise MarsError(f"the dataset '{path}' cannot be read ({reason}): {suggestion}.") from None


def _check_entries(folder: str) -> None:
    """Raise MarsError for a folder with too many files, such as a home folder: `datasets` would list them all."""
    num_entries = 0
    for _, folders, files in os.walk(folder):
        num_entries += len(folders) + len(files)
        if num_entries > DATASET_FILES:
            raise MarsError(
                f"the folder '{folder}' holds more than {DATASET_FILES:,} files: name a file, or the folder of one "
                "dataset."
            )


def columns(path: str) -> Iterator[tuple[str, JsonObject]] | None:
    """Return the rows of a dataset as (place, columns) for `generate --prompts-file`, or None if it is no dataset.

    Raises:
      MarsError: as for `read_hub`.
    """
    if not is_hub_name(path):
        return None
    return ((fields.where, fields.values) for fields in read_hub(path, "prompts"))
