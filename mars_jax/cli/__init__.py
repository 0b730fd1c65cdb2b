"""Parts that the command lines share: flags, prompts files, rows of JSON, resumable output and the terminal."""
