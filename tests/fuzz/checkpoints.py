"""Fuzzing of checkpoint files: config.json, safetensors, indexes, and conversions, which fail cleanly or succeed."""

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from hypothesis import strategies as st

from mars_jax import hub
from mars_jax.contrib.drafters.dflash_files import from_dflash_json
from mars_jax.contrib.drafters.system_files import load_system
from mars_jax.hub.config_json import read_directory, read_json
from mars_jax.hub.heads.eagle_files import from_head_json
from mars_jax.hub.load import find_tensors, read_config
from mars_jax.models import ModelConfig, init_params
from mars_jax.models.transformer import language_model
from mars_jax.models.weights import weights
from tests.fuzz.damage import damaged, damaged_bytes, damaged_json, to_text
from tests.fuzz.harness import Surface, empty
from tests.helpers.checkpoint_files import GEMMA_2, GEMMA_3, QWEN_3_MOE, shard
from tests.helpers.head_files import HEAD, SHAPES

CONFIG = ModelConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
_SIZES = {
    "vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3],
    "torch_dtype": "float32",
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "mscale": 1.0}
_YARN |= {"mscale_all_dim": 2}
_LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: tuple[dict[str, Any], ...] = (
    _SIZES | {"architectures": ["LlamaForCausalLM"], "rope_scaling": _LLAMA_3, "attention_bias": True},
    _SIZES | {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "rope_scaling": _YARN},
    _SIZES | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    _SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    _SIZES | {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 8, "swiglu_limit": 7.0},
    GEMMA_2,
    GEMMA_3,
    QWEN_3_MOE,
)


def _prepared(folder: Path) -> None:
    hub.save(folder / "in", CONFIG, init_params(CONFIG, jax.random.key(0)))


def config(case: tuple[bytes, bytes | None], folder: Path) -> None:
    """Read a config.json, in some cases with a generation_config.json."""
    place = folder / "in"
    data, generation = case
    (place / "config.json").write_bytes(data)
    (place / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (place / "generation_config.json").write_bytes(generation)
    parsed = read_directory(place)[0]
    assert read_config(place) == parsed
    language_model(parsed)
    weights(parsed)


def _read_all(place: Path) -> None:
    for _, tensor in find_tensors(place, CONFIG).values():
        assert tensor.read().shape == tensor.shape


def safetensors(case: bytes, folder: Path) -> None:
    """Read a model.safetensors."""
    (folder / "in" / "model.safetensors").write_bytes(case)
    _read_all(folder / "in")


def index(case: bytes, folder: Path) -> None:
    """Read the tensors of a model.safetensors.index.json, whose files are next to it."""
    (folder / "in" / "model.safetensors.index.json").write_bytes(case)
    _read_all(folder / "in")


def conversion(case: tuple[str, bytes], folder: Path) -> None:
    """Convert a checkpoint with a damaged file: it writes either nothing or a complete checkpoint."""
    place, output = folder / "damaged", folder / "made"
    shutil.copytree(folder / "in", place)
    (place / case[0]).write_bytes(case[1])
    try:
        hub.convert(place, output)
        hub.load(output)
        shutil.rmtree(output)
    finally:
        shutil.rmtree(place)


def head(case: tuple[str, bytes], folder: Path) -> None:
    """Read the config.json of a head or of a system of drafters."""
    kind, data = case
    path = folder / "in" / "config.json"
    path.write_bytes(data)
    if kind == "eagle":
        from_head_json(read_json(path), SHAPES, _TARGET)
    elif kind == "dflash":
        from_dflash_json(read_json(path), _DFLASH_SHAPES, _TARGET)
    else:
        load_system(folder / "in", kind)


def _base(write: Callable[[Path], None] = _prepared) -> Path:
    """Write a valid checkpoint for strategies to damage, into a folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="mars-jax-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write(folder)
    return folder / "in"


@st.composite
def _header(draw: st.DrawFn, data: bytes) -> bytes:
    """Damage the header of a safetensors file, and prefix it with its true length or a wrong one."""
    size = int.from_bytes(data[:8], "little")
    text = to_text(draw(damaged(json.loads(data[8 : 8 + size])))).encode()
    length = draw(st.sampled_from((*[len(text)] * 10, 0, 1, size, 2**31, 2**63)))
    return length.to_bytes(8, "little") + text + data[8 + size :]


def _weights() -> st.SearchStrategy[bytes]:
    data = (_base() / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    return st.one_of(_header(data), _header(data), damaged_bytes(data, last=8 + size), damaged_bytes(data))


def _index() -> st.SearchStrategy[bytes]:
    return damaged_json(json.loads((_base(_shards) / "model.safetensors.index.json").read_text()))


_CONFIG_FILES = st.one_of(*map(damaged_json, CONFIGS))
_GENERATION = st.one_of(st.none(), damaged_json({"eos_token_id": [1, 2], "bos_token_id": 0}, max_edits=1))
_TARGET = dataclasses.replace(CONFIG, num_layers=9, windows=())
_DFLASH_SHAPES = {"fc.weight": (16, 32), "hidden_norm.weight": (16,)}
_DFLASH = {"architectures": ["DFlashDraftModel"], "block_size": 4, "mask_token_id": 3, "num_target_layers": 9}
_EAGLE = {"rope_theta": 1e4, "target_hidden_size": 16, "eagle_config": {"use_aux_hidden_state": True}}
_HEADS: dict[str, dict[str, Any]] = {
    "eagle": HEAD | _EAGLE,
    "dflash": _SIZES | _DFLASH | {"dflash_config": {"target_layer_ids": [1, 5]}},
    "sprinter": {"model_type": "sprinter", "draft": "tiny/draft", "draft_tokens": 5},
    "trispec": {"model_type": "trispec", "draft": "tiny/draft", "proxy": "tiny/draft"},
    "via_sd": {"model_type": "via_sd", "draft": "tiny/draft", "layers": [[True, False], [True, True]]},
}


def _shards(folder: Path) -> None:
    _prepared(folder)
    shard(folder / "in", "safetensors")


SURFACES = {
    "config.json": Surface(st.tuples(_CONFIG_FILES, _GENERATION), config, 3000, empty),
    "safetensors": Surface(st.deferred(_weights), safetensors, 1500, _prepared),
    "index": Surface(st.deferred(_index), index, 1000, _shards),
    "conversion": Surface(
        st.one_of(
            st.deferred(_weights).map(lambda data: ("model.safetensors", data)),
            damaged_json(CONFIGS[0]).map(lambda data: ("config.json", data)),
        ),
        conversion,
        200,
        _prepared,
    ),
    "config of a head": Surface(
        st.one_of(*(st.tuples(st.just(kind), damaged_json(config)) for kind, config in _HEADS.items())),
        head,
        1500,
        empty,
    ),
}
