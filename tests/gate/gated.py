"""How a model is held against its baseline, and what is asked of the gate."""

from __future__ import annotations

import propcheck
from propcheck.gate_findings import CHECKS

TOKENS, BATCH = 64, 4


def scan(build, **options):
    """Scan on sequences of 64 uniform ids, under a name that every model of a test has."""
    options.setdefault("tokens", TOKENS)
    options.setdefault("threads", 1)
    settings = {"name": "toy", "inputs.source": "uniform", **options.pop("set", {})}
    return propcheck.scan(build, set=settings, **options)


def gate(candidate, baseline, *, tolerance=None, force=False, **options):
    """Scan both, and gate the first with the second."""
    return propcheck.gate(scan(candidate, **options), scan(baseline, **options), tolerance=tolerance, force=force)


def failures(gate):
    """Give what fails a gate, as the identifiers of its checks."""
    return {one.rule for one in gate.findings if one.severity == "error"}


def won(gate):
    """Give the rules of a scan that found something which they did not find in the baseline."""
    words = [one.message.split() for one in gate.findings if one.rule == "gate-findings" and one.message.startswith("New")]
    return {of[2] for of in words}


def failed(gate, rule, metric=None):
    """Give the one finding of a check, for one quantity."""
    assert rule in CHECKS
    (one,) = (one for one in gate.findings if one.rule == rule and metric in (None, one.metric))
    return one


def blocks(gate, quantity):
    """Give the blocks in which a quantity is not as it was."""
    return {one.place.block for one in gate.differences if one.quantity == quantity}


def start(gate):
    """Say where the change starts."""
    return None if gate.start is None else (gate.start.block, gate.start.sublayer)
