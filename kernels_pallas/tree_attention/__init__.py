"""Attention of a drafted tree, or of a chunk of a prompt, over the key-value cache."""
