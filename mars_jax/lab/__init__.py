"""Measurements, training and plans: nothing here is needed to decode."""
