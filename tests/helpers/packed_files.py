"""Checkpoints in the packed formats of compressed-tensors and others."""

import numpy as np

from mars_jax.models import ModelConfig

HOW = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
    },
}
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64
)  # fmt: skip


def packed(q, zero, scale, method):
    """Return the packed tensors of q [in, out], zero and scale [groups, out], packed one number at a time."""

    def rows(array, order=range(8)):
        """Pack [n, 8 m] into i32[n, m]."""
        words = np.zeros((len(array), array.shape[1] // 8), np.uint32)
        for place, source in enumerate(order):
            words |= array[:, source::8].astype(np.uint32) << np.uint32(4 * place)
        return words.view(np.int32)

    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": rows(q, order), "qzeros": rows(zero, order), "scales": scale}
    if method == "gptq":
        return {"qweight": rows(q.T).T.copy(), "qzeros": rows((zero - 1) & 15), "scales": scale}
    return {
        "weight_packed": rows(q.T.copy()),
        "weight_zero_point": rows(zero).T.copy(),
        "weight_scale": scale.T.copy(),
        "weight_shape": np.asarray(q.T.shape),
    }
