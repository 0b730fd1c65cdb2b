"""Config of a draft head, and the tensor shapes of its file."""

HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 17, "hidden_size": 16}
SHAPES = {"fc.weight": (16, 48), "layers.0.hidden_norm.weight": (16,), "lm_head.weight": (9, 16), "d2t": (9,)}
