"""Rules that belong to one paper."""
