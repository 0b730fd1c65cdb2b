"""Margin-aware acceptance: the two largest logits of each node, the edges that MARS accepts, and the walk over them."""
