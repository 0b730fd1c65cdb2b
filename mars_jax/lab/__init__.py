"""Measurement, training and planning. Decoding does not need this package."""
