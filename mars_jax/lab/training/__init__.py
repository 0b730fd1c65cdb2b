"""Train small models: text into blocks of tokens, objectives, and a loop that a kill does not harm."""
