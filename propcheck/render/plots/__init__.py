"""Plots of runs and comparisons."""
