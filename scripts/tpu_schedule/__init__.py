"""Cost of each part of a decode step on a TPU, computed from the schedules that libtpu's compiler writes."""
