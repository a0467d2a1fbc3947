"""PC201, PC202, PC203 and PC209 on curves whose factors are known in closed form."""

import dataclasses
import math
import random

import pytest
from synthetic import additive, factors, post_norm, run_of, site, with_gradient

from propcheck.rules import judge


def ids(run, **options):
    return [finding.rule for finding in judge(run, **options)]


def only(run, rule):
    (finding,) = judge(run, select=[rule])
    return finding


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6, 12, 16, 32, 64, 200])
def test_square_root_growth_is_healthy_at_any_depth(blocks):
    assert ids(run_of(additive(blocks))) == []


def test_square_root_growth_to_a_large_end_value_is_no_explosion():
    records = additive(64, embedding=20.0, updates=(30.0, 300.0))
    assert records[-1].sum_rms > 2000
    assert "PC201" not in ids(run_of(records))


def test_aligned_updates_grow_linearly_and_are_no_explosion():
    records, stream = [], 1.0
    for number in range(128):
        records.append(site(number, number // 2, stream=stream, total=stream + 1))
        stream += 1
    assert "PC201" not in ids(run_of(records))


def test_a_trained_gpt2_xl_is_no_explosion():
    # x1.045 a layer over 48 layers (Heimersheim and Turner 2023).
    assert ids(run_of(factors(48, forward=1.045))) == []


def test_ten_percent_a_block_is_an_explosion_that_compounds_to_446():
    finding = only(run_of(factors(64, forward=1.1)), "PC201")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(1.1)
    assert "x1.1 per block" in finding.message
    assert "x446 over 64 blocks" in finding.message
    assert "It grows as 1.1^block, an exponential, over blocks 16 to 63." in finding.message


def test_the_same_end_value_is_judged_by_how_it_is_reached():
    rooted = additive(64, embedding=0.1, updates=(0.0001, 5.0))
    end = rooted[-1].sum_rms / rooted[1].sum_rms
    assert "PC201" not in ids(run_of(rooted))
    assert end == pytest.approx(8, rel=0.01)
    assert "PC201" in ids(run_of(factors(32, forward=(5 * end) ** (1 / 32))))


def test_a_moderate_explosion_is_a_warning():
    assert only(run_of(factors(12, forward=1.3)), "PC201").severity == "warning"  # 1.3^12 = 23.3


def test_a_residual_doubled_from_one_block_on_is_an_explosion():
    records, stream = [], 0.03
    for number in range(32):
        block, total = number // 2, math.hypot(stream, 0.004)
        if block >= 5 and number % 2 == 0:
            total = 2 * stream
        records.append(site(number, block, ("attention", "mlp")[number % 2], stream=stream, update=0.004, total=total))
        stream = total
    finding = only(run_of(records), "PC201")
    assert finding.site.sublayer == "mlp"
    assert finding.site.block >= 5
    assert "attention additions" in finding.message


def test_one_jump_is_not_an_explosion():
    records = additive(64)
    jumped = [
        dataclasses.replace(
            r, stream_rms=r.stream_rms * (30 if r.site > 60 else 1), sum_rms=r.sum_rms * (30 if r.site >= 60 else 1)
        )
        for r in records
    ]
    found = ids(run_of(jumped))
    assert "PC201" not in found
    assert "PC205" in found


def test_ten_percent_less_a_block_is_a_collapse():
    finding = only(run_of(factors(64, forward=0.9)), "PC202")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(0.9)
    assert "x0.00118 over 64 blocks" in finding.message
    assert "It goes as 0.9^block, an exponential" in finding.message


@pytest.mark.parametrize("blocks", [1, 2, 12, 64])
def test_a_flat_post_norm_stream_is_healthy(blocks):
    assert ids(run_of(post_norm(blocks), placement="post")) == []


def test_a_stream_that_is_zero_is_a_collapse_where_it_begins():
    records = [dataclasses.replace(r, sum_rms=0.0) if r.site >= 9 else r for r in additive(8)]
    finding = only(run_of(records), "PC202")
    assert (finding.site.site, finding.site.block, finding.severity) == (9, 4, "error")
    assert "so are 6 more sums" in finding.message


def dead(record, *, own_gradient):
    return dataclasses.replace(record, update_rms=0.0, update_ratio=0.0, param_grad_norm=own_gradient)


def test_a_branch_without_update_and_without_gradient_is_dead():
    records = additive(8)
    records[7] = dead(records[7], own_gradient=0.0)
    finding = only(run_of(records), "PC203")
    assert (finding.site.site, finding.site.sublayer, finding.severity) == (7, "mlp", "error")
    assert finding.expected == pytest.approx(1.0)  # what its siblings write


def test_a_zero_initialised_projection_with_a_gradient_of_its_own_is_healthy():
    assert ids(run_of([dead(r, own_gradient=0.1) for r in additive(8)])) == []


def test_branches_behind_a_zero_head_are_not_called_dead():
    records = [with_gradient(dead(r, own_gradient=0.0), 0.0, 0.0) for r in additive(8)]
    assert "PC203" not in ids(run_of(records))


def test_a_branch_whose_gradient_was_not_observed_is_not_called_dead():
    assert "PC203" not in ids(run_of([dead(r, own_gradient=None) for r in additive(8)]))


def test_dead_branches_of_one_kind_are_one_finding():
    records = [dead(r, own_gradient=0.0) if r.sublayer == "attention" else r for r in additive(8)]
    finding = only(run_of(records), "PC203")
    assert "7 more sites" in finding.message
    assert finding.expected == "above 0"  # its siblings are as dead: their size is not what is right


def test_a_branch_a_million_times_weaker_than_its_siblings_is_a_warning():
    records = additive(8)
    records[7] = dataclasses.replace(records[7], update_rms=1e-6, param_grad_norm=1e-7)
    assert only(run_of(records), "PC203").severity == "warning"


def test_layerscale_makes_every_branch_small_and_none_dead():
    assert ids(run_of(additive(12, updates=(1e-5, 1e-5)))) == []


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
    assert "their sum overflows" in only(run_of(records), "PC209").message


def test_a_statistic_that_overflows_over_finite_elements_is_no_non_finite_activation():
    records = additive(4)
    records[5] = dataclasses.replace(records[5], nonfinite=0, sum_rms=math.inf)
    assert "PC209" not in ids(run_of(records))


def test_one_seed_of_three_with_nan_is_found():
    records = [r if r.seed != 1 or r.site < 3 else broken(r) for seed in range(3) for r in additive(4, seed=seed)]
    finding = only(run_of(records, seeds=(0, 1, 2)), "PC209")
    assert finding.site.site == 3
    assert finding.message.endswith("Seen in 1 of 3 seeds.")


def test_several_seeds_are_judged_by_their_median():
    records = [r for seed in range(3) for r in factors(64, forward=1.1 if seed < 2 else 1.0, seed=seed)]
    assert only(run_of(records, seeds=(0, 1, 2)), "PC201").message.endswith("Seen in 2 of 3 seeds.")
    records = [r for seed in range(3) for r in factors(64, forward=1.1 if seed < 1 else 1.0, seed=seed)]
    assert ids(run_of(records, seeds=(0, 1, 2)), select=["PC201"]) == []


@pytest.mark.parametrize("seed", range(40))
def test_noise_around_a_healthy_curve_never_fires(seed):
    draw = random.Random(seed)
    blocks = draw.choice([2, 3, 4, 5, 8, 12, 24, 64])
    records, stream = [], draw.uniform(0.3, 3)
    for number in range(2 * blocks):
        update = (0.3, 1.0)[number % 2] * draw.lognormvariate(0, 0.15)
        records.append(site(number, number // 2, ("attention", "mlp")[number % 2], stream=stream, update=update))
        stream = records[-1].sum_rms
    gradient = 1.0
    for number in reversed(range(2 * blocks)):
        before = gradient * math.sqrt(1 + 1.5 * records[number].update_ratio ** 2) * draw.lognormvariate(0, 0.03)
        records[number] = with_gradient(records[number], before, gradient)
        gradient = before
    assert ids(run_of(records)) == []
