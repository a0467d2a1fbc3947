"""PC305: gradients and losses that are not finite."""

import dataclasses
import math

import pytest
from synthetic import additive, only_finding, parameter, run_of, with_gradient

from propcheck.rules import judge


def test_the_last_site_with_a_bad_gradient_leads():
    records = [with_gradient(r, math.nan, math.nan) if r.site < 6 else r for r in additive(8)]
    records[5] = dataclasses.replace(records[5], grad_sum_norm=1.0, grad_update_norm=1.0)
    (finding,) = judge(run_of(records))
    assert (finding.rule, finding.site.site, finding.metric) == ("PC305", 5, "grad_stream_norm")
    assert "its own backward" in finding.message
    assert "5 earlier sites" in finding.message


def test_a_loss_that_is_nan_is_named_as_the_cause():
    records = [with_gradient(r, math.nan, math.nan) for r in additive(8)]
    assert "the loss itself is NaN" in only_finding(run_of(records, loss=math.nan), "PC305").message


def test_a_non_finite_forward_pass_is_reported_once():
    records = [dataclasses.replace(with_gradient(r, math.nan, math.nan), nonfinite=3) for r in additive(8)]
    (finding,) = judge(run_of(records, loss=math.nan))
    assert finding.rule == "PC209"
    assert "gradient is not finite at 16 sites" in finding.message


def test_a_parameter_with_a_bad_gradient_outside_the_sites_is_found():
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.inf)
    finding = only_finding(run_of(additive(4), [bad]), "PC305")
    assert finding.site.parameter == "embedding.weight"
    assert "The gradient of embedding.weight is NaN or infinite" in finding.message
    finding = only_finding(run_of(additive(4), [bad, dataclasses.replace(bad, name="other.weight")]), "PC305")
    assert "The gradients of embedding.weight and 1 more parameter are NaN or infinite" in finding.message


@pytest.mark.parametrize("changes", [{"nonfinite": 3}, {"grad_stream_norm": math.nan}])
def test_parameters_are_not_told_of_where_the_stream_of_any_seed_spoilt_them(changes):
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.nan)
    first = [dataclasses.replace(r, **changes) for r in additive(4)]
    run = run_of([*first, *additive(4, seed=1), *additive(4, seed=2)], [bad], seeds=(0, 1, 2))
    (finding,) = judge(run, select=["PC209", "PC305"])
    assert finding.site.parameter is None
    assert finding.message.endswith("Seen in 1 of 3 seeds.")


def test_a_loss_that_is_nan_after_a_finite_pass_is_found():
    # A mean over no targets is 0 / 0, and its gradients are zero: those of the stream and of every parameter are finite.
    (finding,) = judge(run_of([with_gradient(r, 0.0, 0.0) for r in additive(4)], loss=math.nan))
    assert (finding.rule, finding.severity, finding.metric, finding.site.site) == ("PC305", "error", "loss", None)
    assert "The loss is NaN, although every sum of the stream" in finding.message
    seeds = [*additive(4), *additive(4, seed=1)]
    assert only_finding(run_of(seeds, loss=math.inf, seeds=(0, 1)), "PC305").message.startswith("The loss is inf, although")


def test_what_lies_beside_two_streams_is_told_once():
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.inf)
    assert len(judge(run_of(two_streams(), [bad]), select=["PC305"])) == 1
    assert len(judge(run_of(two_streams(), loss=math.nan), select=["PC305"])) == 1


def two_streams():
    return [dataclasses.replace(r, continues=r.site - 1 if r.site not in (0, 8) else None) for r in additive(8)]
