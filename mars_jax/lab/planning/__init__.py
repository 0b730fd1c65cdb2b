"""Planning for TPU slices: compile the decode step ahead of time, without a TPU and without weights."""
