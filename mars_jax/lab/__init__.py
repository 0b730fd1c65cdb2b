"""Measurements, training and plans. Decoding does not need this package."""
