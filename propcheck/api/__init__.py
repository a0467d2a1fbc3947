"""scan, compare, gate and sweep: the only place where the steps of a run are put together."""
