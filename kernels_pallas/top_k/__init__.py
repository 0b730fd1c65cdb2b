"""The k largest logits of each row and the row's logsumexp, as a drafter needs them."""
