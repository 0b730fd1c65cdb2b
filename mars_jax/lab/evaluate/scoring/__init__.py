"""Scores of answers: metrics, and samples for HumanEval's evaluator."""
