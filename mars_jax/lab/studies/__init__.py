"""Studies of a rule: calibration, and what relaxed tokens do to the text after them."""
