"""Attention of a drafted tree, or of a prompt chunk, over the key-value cache."""
