"""Runs held against one another: what belongs together, where they part, and whether that may be."""
