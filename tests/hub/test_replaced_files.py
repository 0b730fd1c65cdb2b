"""Files that are replaced while a process runs: it reads the current version and never mixes two versions."""

import json
import os
import shutil

import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.hub.load import find_tensors
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from tests.helpers.gguf_files import our_logits, write

EMBEDDED = assets.FOLDER / "tiny" / "target"
TEXT = "Once upon a time, abcd"


def replace(path, data):
    new = path.with_name("new")
    new.write_bytes(data)
    os.replace(new, path)


def rewrite(path, data):
    inode = path.stat().st_ino
    path.write_bytes(data)
    assert path.stat().st_ino == inode


def test_a_replaced_gguf_file_is_read_again(tmp_path):
    path = write(tmp_path / "model.gguf", "llama")
    copy = write(tmp_path / "copy.gguf", "llama", seed=1, values={"llama.rope.freq_base": 40000.0})
    copy.write_bytes(copy.read_bytes().replace(b"ab\2\0\0\0\0\0\0\0cd", b"cd\2\0\0\0\0\0\0\0ab"))
    old = mj.load(str(path))
    old_logits, old_ids = our_logits(old), old.encode("abab")
    assert path.stat().st_size == copy.stat().st_size
    replace(path, copy.read_bytes())
    new, expected = mj.load(str(path)), mj.load(str(copy))
    assert new.config == expected.config != old.config
    np.testing.assert_array_equal(our_logits(new), our_logits(expected))
    assert np.abs(our_logits(new) - old_logits).max() > 1
    assert new.encode("abab") == expected.encode("abab") == [3, 3] and old_ids == [2, 2]


def swap_tokens(path):
    """Return the file with the ids of two tokens swapped, which keeps its size."""
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    first, second = "\u0120upon", "\u0120time"
    assert len(str(vocab[first])) == len(str(vocab[second]))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return json.dumps(data).encode()


CHANGES = {"tokenizer.json": swap_tokens, "chat_template.jinja": lambda path: b"{{ messages[0].content }}!"}


def ids_of(folder):
    model = hub.outline(str(folder))
    return model.encode(TEXT), model.encode(TEXT, chat=True), model.tokenizer(TEXT)["input_ids"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_replaced_tokenizer_is_read_again(tmp_path, name):
    checkpoint = shutil.copytree(EMBEDDED, tmp_path / "model")
    old_ids = ids_of(checkpoint)
    assert ids_of(checkpoint) == old_ids
    rewrite(checkpoint / name, CHANGES[name](checkpoint / name))
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert old_ids != ids_of(checkpoint) == ids_of(copy)


def gguf_file(folder):
    return write(folder / "model.gguf", "llama"), write(folder / "other.gguf", "llama", seed=1)


def safetensors(folder):
    shutil.copytree(EMBEDDED, folder / "model")
    shutil.copy(folder / "model" / "model.safetensors", folder / "other")
    return folder / "model" / "model.safetensors", folder / "other"


def torch_bin(folder):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    file, _ = safetensors(folder)
    torch.save(load_file(file), folder / "other")
    file.unlink()
    shutil.copy(folder / "other", file.with_name("pytorch_model.bin"))
    return file.with_name("pytorch_model.bin"), folder / "other"


@pytest.mark.parametrize("put", [replace, rewrite])
@pytest.mark.parametrize("make", [gguf_file, safetensors, torch_bin])
def test_tensors_of_a_file_that_changed_after_its_header_was_read_are_refused(tmp_path, make, put):
    file, replacement = make(tmp_path)
    path = file if file.suffix == ".gguf" else file.parent
    tensors = find_tensors(path, hub.read_config(str(path)))
    _, tensor = tensors["model.norm.weight"]
    tensor.read()
    put(file, replacement.read_bytes())
    with pytest.raises(MarsError, match=f"{file.name}' changed while it was being read: load it again"):
        tensor.read()


def test_models_of_one_path_do_not_share_a_chat_template():
    first, second = hub.outline(assets.TARGET), hub.outline(assets.TARGET)
    first.tokenizer.chat_template = "{{ messages[0].content }}!"
    assert second.tokenizer.chat_template != first.tokenizer.chat_template
    assert first.encode("Hi", chat=True) == first.encode("Hi!")[1:] != second.encode("Hi", chat=True)
