"""Evaluation tasks whose answers can be checked exactly."""
