"""The command-line interface: flags, prompts files, JSON rows, resumable output and output on a terminal."""
