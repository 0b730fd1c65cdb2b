"""Margin-aware acceptance (MARS): find the two largest logits of each node, and walk the tree over accepted edges."""
