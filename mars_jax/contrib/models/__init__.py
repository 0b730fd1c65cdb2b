"""Heads of the rules and drafters in `contrib`."""
