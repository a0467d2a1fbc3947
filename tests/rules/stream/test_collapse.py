"""PC202 on streams whose factor per block is known in closed form."""

import dataclasses

import pytest
from synthetic import additive, broken_rules, factors, only_finding, post_norm, run_of


def test_ten_percent_less_a_block_is_a_collapse():
    finding = only_finding(run_of(factors(64, forward=0.9)), "PC202")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(0.9)
    assert "x0.00118 over 64 blocks" in finding.message
    assert "It goes as 0.9^block, an exponential" in finding.message


@pytest.mark.parametrize("blocks", [1, 2, 12, 64])
def test_a_flat_post_norm_stream_is_healthy(blocks):
    assert broken_rules(run_of(post_norm(blocks), placement="post")) == []


def test_a_stream_that_is_zero_is_a_collapse_where_it_begins():
    records = [dataclasses.replace(r, sum_rms=0.0) if r.site >= 9 else r for r in additive(8)]
    finding = only_finding(run_of(records), "PC202")
    assert (finding.site.site, finding.site.block, finding.severity) == (9, 4, "error")
    assert "so are 6 more sums" in finding.message
