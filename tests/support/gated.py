"""How a model is held against its baseline, and what is asked of the gate."""

from __future__ import annotations

import functools

from toy import Decoder

import propcheck
from propcheck.comparison.gate_findings import CHECKS

TOKENS = 64


def scan(build, **options):
    """Scan on sequences of 64 uniform ids, under a name that every model of a test has."""
    options.setdefault("tokens", TOKENS)
    options.setdefault("threads", 1)
    settings = {"name": "toy", "inputs.source": "uniform", **options.pop("set", {})}
    return propcheck.scan(build, set=settings, **options)


def gated(run, baseline, *, tolerance=None, force=False):
    """Hold one run against another."""
    return propcheck.gate(run, baseline, tolerance=tolerance, force=force)


@functools.cache
def toy(blocks=8):
    """Scan the toy, once."""
    return scan(lambda: Decoder(blocks=blocks))


def gate(candidate, baseline, **options):
    """Scan what is not scanned yet, and gate the first with the second."""
    return gated(*(one if isinstance(one, propcheck.Run) else scan(one, **options) for one in (candidate, baseline)))


def failures(found):
    """Give what fails a gate, as the identifiers of its checks."""
    return {one.rule for one in found.findings if one.severity == "error"}


def won(found):
    """Give the rules of a scan that found something which they did not find in the baseline."""
    words = [one.message.split() for one in found.findings if one.rule == "gate-findings" and one.message.startswith("New")]
    return {of[2] for of in words}


def failed(found, rule, metric=None):
    """Give the one finding of a check, for one quantity."""
    assert rule in CHECKS
    (one,) = (one for one in found.findings if one.rule == rule and metric in (None, one.metric))
    return one


def blocks(found, quantity):
    """Give the blocks in which a quantity is not as it was."""
    return {one.place.block for one in found.differences if one.quantity == quantity}


def start(found):
    """Say where the change starts."""
    return None if found.start is None else (found.start.block, found.start.sublayer)
