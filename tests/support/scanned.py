"""How the faults are scanned, and what is asked of a run."""

from __future__ import annotations

import functools

from toy import BLOCKS, Block, Decoder

import propcheck

TOKENS, BATCH = 64, 4  # the gradients of a mean loss, which the tests cite, go by their number


def scan(build, **options):
    """Scan what ``build`` makes on sequences of 64 uniform ids, unless it brings a batch of its own."""
    options.setdefault("tokens", TOKENS)
    return propcheck.scan(build, threads=1, set={"inputs.source": "uniform", **options.pop("set", {})}, **options)


@functools.cache
def scanned(build, **options):
    """Scan once, however many tests look at the run."""
    return scan(build, **options)


@functools.cache
def healthy(block=Block, blocks=BLOCKS, **options):
    """Scan a decoder all of whose blocks are alike, once."""
    return scan(lambda: Decoder(block, blocks), **options)


def found(run, *rules):
    """Give the findings of these rules."""
    return [one for one in run.findings if one.rule in rules]


def errors(run):
    return [(one.rule, one.message) for one in run.findings if one.severity == "error"]


def sites(run, block=None):
    """Give the rows of a run's sites, of one block or of all."""
    return [one for one in run.record.sites if block is None or one.block == block]


def parameter(run, name):
    (one,) = (one for one in run.record.parameters if name in one.name.split(" = "))
    return one


def norm(run, module):
    """Give the row of the norm that a module computes."""
    (one,) = (one for one in run.record.norms if one.module == module)
    return one
