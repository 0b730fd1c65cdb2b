"""The benchmark: arms, rows, figures and the report."""
