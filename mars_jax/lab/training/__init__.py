"""Training of small models: blocks of tokens from text, objectives, and a loop that can be killed and resumed."""
