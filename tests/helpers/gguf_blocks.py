"""Write GGUF files of random quantized blocks."""

import gguf
import numpy as np

from mars_jax.hub.config_json import from_json
from mars_jax.models.weights import weights


def file_of(path, data, *, hidden, inner, layers, vocab):
    """Write a llama file. `data(name, shape)` returns the bytes of a matrix and their quantization type."""
    sizes = {"embedding_length": hidden, "feed_forward_length": inner, "block_count": layers}
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (sizes | {"context_length": 128, "attention.head_count": 16}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for row in weights(from_json(config | {"tie_word_embeddings": True})):
        name = names.get_name(row.name, try_suffixes=(".weight", ".bias"))
        if len(row.shape) > 1:
            array, kind = data(name, row.shape)
            writer.add_tensor(name, array, raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ones(row.shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(draw, shape, kind):
    """Return random bytes of a matrix in Q4_K, Q5_K or Q6_K, with scale factors as large as real ones."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // 256, size), np.uint8)
    factors = draw.uniform(0.5, 1, (*blocks.shape[:2], 2)).astype(np.float16)
    if kind.name == "Q6_K":
        blocks[..., -2:] = (factors[..., :1] * np.float16(2e-5)).view(np.uint8)
    else:  # one factor for scales, and one for minima that is 7.5 times as large, so that weights are centred
        blocks[..., :4] = (factors * np.float16([2e-4, 1.5e-3])).view(np.uint8)
    return blocks.reshape(shape[0], -1)
