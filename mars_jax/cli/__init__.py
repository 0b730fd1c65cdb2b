"""Shared parts of the command lines: flags, prompts files, rows of JSON, resumable output and the terminal."""
