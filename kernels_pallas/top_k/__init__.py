"""The k largest logits of each row and the row's logsumexp, for drafters."""
