"""Reader of the schedules that libtpu's compiler writes, for the cost of each part of a decode step on a TPU."""
