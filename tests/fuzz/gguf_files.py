"""Fuzzing of GGUF files: damaged bytes, and well-formed metadata and tensors that contradict each other."""

import functools
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from mars_jax.hub.gguf_config import read_gguf_config
from mars_jax.hub.gguf_file import read_gguf
from mars_jax.hub.gguf_tensors import gguf_tensors
from mars_jax.hub.tokenizer import read_tokenizer
from mars_jax.models.weights import weights
from tests.fuzz.damage import damaged_bytes
from tests.fuzz.harness import Surface
from tests.helpers.gguf_files import write

HEADER_BYTES = 4000
KEYS = (
    *("general.architecture", "general.alignment", "llama.embedding_length", "llama.feed_forward_length"),
    *("llama.block_count", "llama.context_length", "llama.attention.head_count", "llama.attention.head_count_kv"),
    *("llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"),
    *("llama.expert_count", "llama.expert_used_count", "llama.nextn_predict_layers"),
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "tokenizer.ggml.eos_token_id"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.scores"),
    *("tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.chat_template"),
)  # fmt: skip
VALUES = (
    *(0, 1, 2, 3, 7, 64, 255, 2**16, 2**31 - 1, -1, True, False),
    *(0.0, -1.0, 1e38, float("inf"), float("nan")),
    *("", "llama", "gpt2", "gemma3", "yarn", "none", "a" * 99, b"\xff"),
)
_VALUE = st.one_of(
    st.sampled_from(VALUES),
    st.lists(st.sampled_from((0, 1, 2, 255)), min_size=1, max_size=3),
    st.lists(st.sampled_from(("", "a", "a b", "llama")), min_size=1, max_size=3),
)
_TENSORS = ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight")


@functools.cache
def _valid_file(case: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder, "model.gguf"), case).read_bytes()


def read(case: bytes | tuple[dict, list[str]], folder: Path) -> None:
    """Read the config, all tensors and the tokenizer."""
    path = folder / "in" / "model.gguf"
    if isinstance(case, bytes):
        path.write_bytes(case)
    else:
        values, absent = case
        write(path, "llama", values=values, drop=absent)
    config = read_gguf_config(read_gguf(path))[0]
    shapes = {row.name: row.shape for row in weights(config)}
    for file in gguf_tensors(path, config):
        for name, tensor in file.items():
            if tensor.shape == shapes.get(name):  # `find_tensors` rejects the others
                assert tensor.read().shape == tensor.shape
    read_tokenizer(path)("ab\n")


def _prepare(folder: Path) -> None:
    import transformers

    assert transformers.PreTrainedTokenizerFast  # import it before the first case is timed
    (folder / "in").mkdir()


_CASES = st.one_of(
    st.tuples(
        st.dictionaries(st.sampled_from(KEYS), _VALUE, max_size=3),
        st.lists(st.sampled_from(_TENSORS), max_size=2),
    ),
    st.deferred(lambda: damaged_bytes(_valid_file("llama"))),
    st.deferred(lambda: damaged_bytes(_valid_file("llama"), last=HEADER_BYTES)),
    st.deferred(lambda: damaged_bytes(_valid_file("glm4moe"), last=HEADER_BYTES)),
)
SURFACES = {"GGUF": Surface(_CASES, read, 1500, _prepare)}
