"""Heads of rules and drafters that belong to one paper."""
