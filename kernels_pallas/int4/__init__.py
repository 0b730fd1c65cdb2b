"""Matrix products of a few rows with 4-bit weights, stored in groups that share a scale and an offset."""
