"""Products of a few rows with a matrix of 4-bit weights in groups."""
