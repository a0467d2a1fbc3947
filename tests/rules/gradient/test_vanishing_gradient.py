"""PC302 on gradients whose law is known."""

import dataclasses

import pytest
from synthetic import additive, broken_rules, factors, only_finding, parameter, post_norm, run_of, with_gradient

from propcheck.rules import judge


def test_ten_percent_less_a_block_vanishes():
    finding = only_finding(run_of(factors(64, backward=0.9)), "PC302")
    assert finding.severity == "error"
    assert "x0.00118 over 64 blocks" in finding.message
    assert "It goes as 0.9^block, an exponential" in finding.message


def test_post_norm_as_measured_is_silent():
    assert broken_rules(run_of(factors(48, backward=0.61 ** (1 / 48), placement="post"))) == []
    assert broken_rules(run_of(post_norm(64))) == []


def test_a_cut_is_reported_where_it_is():
    records = [with_gradient(r, 0.0, 0.0 if r.site < 9 else r.grad_sum_norm) if r.site <= 9 else r for r in additive(8)]
    finding = only_finding(run_of(records), "PC302")
    assert (finding.site.site, finding.severity) == (9, "error")
    assert "10 sites get none" in finding.message


def test_no_gradient_at_all_is_an_error():
    records = [with_gradient(r, 0.0, 0.0) for r in additive(8)]
    assert only_finding(run_of(records), "PC302").severity == "error"


def test_a_zero_head_that_learns_is_a_note():
    records = [with_gradient(r, 0.0, 0.0) for r in additive(8)]
    head = parameter("head.weight", absmax=0.0, zeros=12)
    finding = only_finding(run_of(records, [head]), "PC302")
    assert (finding.severity, finding.site.parameter) == ("note", "head.weight")


def test_unobserved_gradients_are_not_judged():
    records = [dataclasses.replace(r, grad_stream_norm=None, grad_sum_norm=None, grad_update_norm=None) for r in additive(8)]
    assert broken_rules(run_of(records)) == []


def two_streams():
    return [dataclasses.replace(r, continues=r.site - 1 if r.site not in (0, 8) else None) for r in additive(8)]


def test_each_of_two_streams_without_a_gradient_is_named():
    records = [with_gradient(r, 0.0, 0.0) for r in two_streams()]
    first, second = judge(run_of(records, [parameter("head.weight", absmax=0.0, zeros=12)]), select=["PC302"])
    assert "any of the 8 sites from site 0 (attention of block 0) to site 7 (mlp of block 3)" in first.message
    assert "any of the 8 sites from site 8 (attention of block 4) to site 15 (mlp of block 7)" in second.message


def side_stream():
    """The first of two streams, without a gradient; the second one has its own."""
    return [with_gradient(r, 0.0, 0.0) if r.site < 8 else r for r in two_streams()]


@pytest.mark.parametrize(
    "reader",
    [
        {"role": "scale", "block": 4, "site": 8, "shape": (1,), "numel": 1, "zeros": 1},  # a gated cross-attention: tanh(0)
        {"role": "linear", "block": 4, "site": 8, "zeros": 12},  # its output projection
        {"role": "linear", "zeros": 12},  # what brings the stream into the other one, outside the blocks
        {"role": "scale", "block": 0, "site": 1, "branches": 9, "zeros": 12},  # one gate, in both streams
    ],
)
def test_a_side_stream_that_is_read_through_a_zero_that_learns_is_a_note(reader):
    """Flamingo, arXiv 2204.14198: tanh of a gate that starts at 0, so that the visual stream gets no gradient at first."""
    finding = only_finding(run_of(side_stream(), [parameter("reader", absmax=0.0, **reader)]), "PC302")
    assert (finding.severity, finding.site.site) == ("note", 7)
    assert "The parameter reader starts at zero and has a gradient of its own: if it reads" in finding.message
    assert "because" not in finding.message


@pytest.mark.parametrize(
    "other",
    [
        {"role": "scale", "block": 4, "site": 8, "grad_state": "zero", "grad_norm": 0.0},  # as dead as what it reads
        {"role": "scale", "block": 4, "site": 8, "requires_grad": False, "grad_state": "none"},
        {"role": "scale", "block": 4, "site": 8, "zeros": 0, "absmax": 0.1},
        {"role": "bias", "block": 4, "site": 8},  # it is added
        {"role": "bias", "block": None, "site": None},  # positions
        {"role": "scale", "block": 0, "site": 3},  # in the stream itself
    ],
)
def test_a_side_stream_that_nothing_will_bring_a_gradient_to_stays_an_error(other):
    finding = only_finding(run_of(side_stream(), [parameter("other", **{"absmax": 0.0, "zeros": 12, **other})]), "PC302")
    assert (finding.severity, finding.site.site) == ("error", 7)
