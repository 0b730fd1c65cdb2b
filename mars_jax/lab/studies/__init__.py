"""Calibration of a rule's threshold."""
