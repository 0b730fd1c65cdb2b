"""Stand-ins for Tunix: the rollout base class, the tokenizer adapter, and models with the weight layout of Tunix."""
