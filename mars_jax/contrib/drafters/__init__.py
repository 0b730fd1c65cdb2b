"""Drafters that belong to one paper."""
