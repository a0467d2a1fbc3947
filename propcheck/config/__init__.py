"""Probe files, their schema, and the options that override them."""
