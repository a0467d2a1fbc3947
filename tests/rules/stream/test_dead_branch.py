"""PC203: branches that add nothing and get no gradient."""

import dataclasses

import pytest
from synthetic import additive, broken_rules, only_finding, run_of, with_gradient


def dead(record, *, own_gradient):
    return dataclasses.replace(record, update_rms=0.0, update_ratio=0.0, param_grad_norm=own_gradient)


def test_a_branch_without_update_and_without_gradient_is_dead():
    records = additive(8)
    records[7] = dead(records[7], own_gradient=0.0)
    finding = only_finding(run_of(records), "PC203")
    assert (finding.site.site, finding.site.sublayer, finding.severity) == (7, "mlp", "error")
    assert finding.expected == pytest.approx(1.0)  # what its siblings write


def test_a_zero_initialised_projection_with_a_gradient_of_its_own_is_healthy():
    assert broken_rules(run_of([dead(r, own_gradient=0.1) for r in additive(8)])) == []


def test_branches_behind_a_zero_head_are_not_called_dead():
    records = [with_gradient(dead(r, own_gradient=0.0), 0.0, 0.0) for r in additive(8)]
    assert "PC203" not in broken_rules(run_of(records))


def test_a_branch_whose_gradient_was_not_observed_is_not_called_dead():
    assert "PC203" not in broken_rules(run_of([dead(r, own_gradient=None) for r in additive(8)]))


def test_dead_branches_of_one_kind_are_one_finding():
    records = [dead(r, own_gradient=0.0) if r.sublayer == "attention" else r for r in additive(8)]
    finding = only_finding(run_of(records), "PC203")
    assert "7 more sites" in finding.message
    assert finding.expected == "above 0"  # its siblings are as dead: their size is not what is right


def test_a_branch_a_million_times_weaker_than_its_siblings_is_a_warning():
    records = additive(8)
    records[7] = dataclasses.replace(records[7], update_rms=1e-6, param_grad_norm=1e-7)
    assert only_finding(run_of(records), "PC203").severity == "warning"


def test_layerscale_makes_every_branch_small_and_none_dead():
    assert broken_rules(run_of(additive(12, updates=(1e-5, 1e-5)))) == []
