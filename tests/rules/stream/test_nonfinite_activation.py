"""PC209: NaN or infinity in the stream."""

import dataclasses
import math

from synthetic import additive, broken_rules, only_finding, run_of

from propcheck.rules import judge


def broken(record):
    return dataclasses.replace(record, nonfinite=40, stream_rms=math.nan, update_rms=math.nan, sum_rms=math.nan)


def test_the_first_non_finite_site_leads_and_the_rest_are_counted():
    records = [broken(r) if r.site >= 7 else r for r in additive(8)]
    records[7] = dataclasses.replace(records[7], stream_rms=3.0)
    (finding,) = judge(run_of(records))
    assert (finding.rule, finding.site.site, finding.value, finding.severity) == ("PC209", 7, 40, "error")
    assert "they come from the update" in finding.message
    assert "8 later sites" in finding.message


def test_a_sum_of_finite_operands_that_overflows_is_told_apart():
    records = additive(4)
    records[5] = dataclasses.replace(records[5], nonfinite=1, sum_rms=math.inf)
    assert "their sum overflows" in only_finding(run_of(records), "PC209").message


def test_a_statistic_that_overflows_over_finite_elements_is_no_non_finite_activation():
    records = additive(4)
    records[5] = dataclasses.replace(records[5], nonfinite=0, sum_rms=math.inf)
    assert "PC209" not in broken_rules(run_of(records))


def test_one_seed_of_three_with_nan_is_found():
    records = [r if r.seed != 1 or r.site < 3 else broken(r) for seed in range(3) for r in additive(4, seed=seed)]
    finding = only_finding(run_of(records, seeds=(0, 1, 2)), "PC209")
    assert finding.site.site == 3
    assert finding.message.endswith("Seen in 1 of 3 seeds.")
