"""Attention of a draft tree, or of a prompt chunk, over the KV cache."""
