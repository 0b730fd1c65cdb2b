"""Matrix products for mixtures of experts: each row times its expert's int8 matrix."""
