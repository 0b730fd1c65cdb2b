"""Products of a few rows with a matrix of grouped 4-bit weights."""
