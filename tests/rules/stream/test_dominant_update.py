"""PC204: an update compared with its stream."""

import dataclasses

import pytest
from synthetic import additive, qwen, run_of

from propcheck.rules import judge


def test_without_the_first_block_rule_the_dominant_update_is_reported_there():
    (finding,) = judge(run_of(qwen()), select=["PC204"])
    # 3.42 on sqrt(0.02^2 + 0.19^2) = 0.191.
    assert (finding.site.site, finding.severity) == (1, "warning")
    assert finding.value == pytest.approx(17.9, rel=0.01)


def test_a_dominant_update_deep_in_the_model_is_reported_with_its_place():
    records = additive(8)
    records[9] = dataclasses.replace(records[9], update_ratio=50.0)
    (finding,) = judge(run_of(records), select=["PC204"])
    assert (finding.site.site, finding.value) == (9, 50.0)
    assert finding.expected < 1


def test_many_dominant_updates_of_one_kind_are_one_finding():
    records = [dataclasses.replace(r, update_ratio=20.0 + r.site) if r.sublayer == "mlp" else r for r in additive(8)]
    (finding,) = judge(run_of(records), select=["PC204"])
    assert finding.site.site == 15
    assert "8 sites from site 1" in finding.message
