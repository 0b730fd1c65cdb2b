"""Matrix products for mixtures of experts, with quantised weights: each row is multiplied by its expert's matrix."""
