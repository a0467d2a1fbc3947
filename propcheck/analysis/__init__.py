"""Derive curves, growth laws and predictions from a run's records."""
