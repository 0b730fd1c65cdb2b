"""A checkpoint with its tokenizer: what `mars_jax.load` gives."""

from mars_jax.pretrained.detokenizer import Detokenizer
from mars_jax.pretrained.pretrained import Pretrained, Prompt, Turn, check_same_vocabulary

__all__ = ["Detokenizer", "Pretrained", "Prompt", "Turn", "check_same_vocabulary"]
