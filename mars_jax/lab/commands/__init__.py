"""Commands for measurement, training and planning."""
