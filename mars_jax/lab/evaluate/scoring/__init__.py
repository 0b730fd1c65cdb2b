"""Scores of answers: metrics, likelihood, programs that are run."""
