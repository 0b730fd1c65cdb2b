"""Top-k for drafters: the k largest logits of each row, and the logsumexp of the row."""
