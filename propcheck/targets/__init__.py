"""Targets of a scan: the user's code, transformers configs and the reference decoder, with their inputs and losses."""
