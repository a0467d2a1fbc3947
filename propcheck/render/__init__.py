"""Render a run, a comparison or a gate from its records."""
