"""Stand-ins of Tunix: the base class of its rollouts, its tokenizer adapter, and a model with its weights' layout."""
