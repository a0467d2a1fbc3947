"""PC210, on curves by hand."""

import dataclasses
import math

import pytest
from synthetic import additive, run_of

from propcheck.rules import judge


def judged(correlations, **changes):
    records = additive(len(correlations) // 2)
    sites = [dataclasses.replace(r, token_correlation=c) for r, c in zip(records, correlations, strict=True)]
    return judge(run_of(sites, **changes), select=["PC210"])


def rising(start, end, sites=32):
    """1 - cosine falls by one factor a site."""
    factor = ((1 - end) / (1 - start)) ** (1 / (sites - 1))
    return [1 - (1 - start) * factor**n for n in range(sites)]


def test_tokens_that_become_alike_are_found_where_they_are():
    # 1 - cosine goes from 0.8 to 8e-5, by 10^(-4/31) a site: below 0.01 from site 15 on, ln(80) / (4/31 ln 10) = 14.75.
    (finding,) = judged(rising(0.2, 1 - 8e-5))
    assert finding.severity == "warning"
    assert finding.site.site == 15
    assert finding.expected == pytest.approx(0.2)
    # The median of the last eight sites: 8e-5 x (10^(4/31 x 3) + 10^(4/31 x 4)) / 2 = 2.288e-4.
    assert finding.value == pytest.approx(1 - 2.288e-4, abs=1e-7)
    assert "from 0.2 after site 0 (attention of block 0) to 1 - 2.29e-4" in finding.message
    assert "0.0229 % of the mean square" in finding.message


@pytest.mark.parametrize(
    "correlations",
    [
        rising(0.12, 0.94),  # pre-norm with ReLU
        rising(0.03, 0.982),  # post-norm, 48 blocks, GELU
        [1.0] * 32,  # one token, repeated
        rising(0.995, 0.9999),  # alike from the start
        [0.999, *[0.2] * 31],  # told apart by the first block
        [*[0.2] * 29, 0.999, 0.999, 0.999],  # the last sites alone
        [None] * 32,
        [math.nan] * 32,
        [],
    ],
)
def test_tokens_that_stay_apart_or_were_alike_before_are_silent(correlations):
    assert not judged(correlations)


def test_tokens_that_are_equal_are_found():
    (finding,) = judged([0.1, 0.5, 0.9, *[1.0] * 13])
    assert finding.value == 1.0
    assert finding.site.site == 3
    assert "to 1 in the last quarter" in finding.message
