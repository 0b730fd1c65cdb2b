"""Reader of the schedules that libtpu's compiler writes: what each part of a decode step costs on a TPU."""
