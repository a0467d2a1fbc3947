"""Run one forward and one backward pass of a recorded model within a memory budget."""
