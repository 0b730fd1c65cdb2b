"""Products of a mixture of experts: each row with the int8 matrix of its expert."""
