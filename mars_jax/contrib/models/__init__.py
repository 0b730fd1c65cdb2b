"""Trained heads that the rules and drafters in `contrib` use."""
