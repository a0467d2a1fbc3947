"""When a number counts as changed, on runs that no model stands behind."""

from __future__ import annotations

import dataclasses
import math

import pytest
from gated import failed, failures
from synthetic import additive, parameter, run_of

from propcheck.comparison.draws import ONE_SEED_FACTOR, ONE_SEED_LOSS_FACTOR
from propcheck.comparison.gate import gate
from propcheck.config.tolerances import Tolerances

NAN, INF = math.nan, math.inf
EVERY = ("stream_rms", "update_rms", "grad_stream_norm", "grad_update_norm", "param_grad_norm")


def with_value(quantity, value, *, site=5, blocks=4):
    """A run of 8 sites with one value of one site, of a parameter, or with this loss."""
    rows, rest, loss = additive(blocks), [parameter("layers.2.mlp.up", site=5, block=2)], 7.0
    if quantity == "loss":
        loss = value
    elif quantity == "grad_norm":
        rest = [dataclasses.replace(rest[0], grad_norm=value)]
    else:
        rows[site] = dataclasses.replace(rows[site], **{quantity: value})
    return run_of(rows, rest, loss=loss)


def judged(quantity, base, value, **tolerances):
    return gate(with_value(quantity, value), with_value(quantity, base), Tolerances(**tolerances))


@pytest.mark.parametrize("quantity", [*EVERY, "grad_norm", "loss"])
@pytest.mark.parametrize(
    ("base", "value", "passes"),
    [
        (1.0, 1.0, True),
        (1.0, 1.0499, True),
        (1.0, 1.0501, False),
        (1.0, 1 / 1.0499, True),
        (1.0, 1 / 1.0501, False),
        (0.0, 0.0, True),
        (0.0, 1e-13, True),  # below the floor
        (1e-13, 0.0, True),
        (1e-13, 9e-13, True),
        (0.0, 0.1, False),
        (0.1, 0.0, False),
        (1e-13, 0.1, False),
        (None, None, True),
        (None, 1.0, False),
        (1.0, None, False),
        (0.0, None, False),
        (None, 0.0, False),
        (NAN, NAN, False),
        (NAN, 1.0, False),
        (1.0, NAN, False),
        (INF, INF, False),
        (INF, 1.0, False),
        (1.0, INF, False),
        (-INF, INF, False),
        (NAN, None, False),
        (None, NAN, False),
        (0.0, NAN, False),
        (NAN, 0.0, False),
    ],
)
def test_a_number_passes_if_its_logarithm_is_near_and_in_no_other_way(quantity, base, value, passes):
    """OpenFAST/openfast issue 1156 is one of those whose comparison let NaN pass."""
    found = judged(quantity, base, value)
    assert found.passed == passes
    assert len(found.differences) == (not passes)
    wild = not all(one is None or math.isfinite(one) for one in (base, value))
    assert failures(found) <= ({"gate-nonfinite"} if wild else {"gate-stream", "gate-gradient", "gate-loss"})


@pytest.mark.parametrize("share", [0.0, 0.05, 9.0])
@pytest.mark.parametrize("floor", [0.0, 1e-12, 1e9])
@pytest.mark.parametrize("wild", [NAN, INF, -INF])
def test_no_tolerance_lets_a_nan_or_an_infinity_pass(wild, share, floor):
    for quantity in (*EVERY, "grad_norm", "loss"):
        for base, value in ((wild, wild), (wild, 1.0), (1.0, wild)):
            assert not judged(quantity, base, value, share=share, floor=floor).passed


@pytest.mark.parametrize(
    ("base", "value", "passes"),
    [(-0.5, -0.51, True), (-0.5, -0.6, False), (-0.5, 0.5, False), (0.5, -0.5, False), (-1e-13, 1e-13, True)],
)
def test_a_loss_may_be_negative_and_may_not_change_its_sign(base, value, passes):
    found = judged("loss", base, value)
    assert found.passed == passes
    if not passes:
        assert failed(found, "gate-loss").value == value


def test_a_tolerance_of_zero_lets_the_same_number_pass_and_not_the_next_one():
    assert judged("update_rms", 0.1, 0.1, share=0.0).passed
    assert not judged("update_rms", 0.1, math.nextafter(0.1, 1), share=0.0).passed
    assert not judged("update_rms", 0.1, math.nextafter(0.1, 0), share=0.0).passed


def test_a_column_that_the_baseline_never_had_is_a_note():
    """An older version did not record it; where one place lacks it, something there is wrong."""
    rows = additive(4)
    without = run_of([dataclasses.replace(one, param_grad_norm=None) for one in rows])
    found = gate(run_of(rows), without, Tolerances())
    assert found.passed
    assert found.notes == ("The baseline has no param_grad_norm, so it is not compared.",)
    back = gate(without, run_of(rows), Tolerances())  # what is not seen any more is lost
    assert failures(back) == {"gate-gradient"}
    assert {one.kind for one in back.differences} == {"unobserved"}


def test_the_message_of_a_lost_gradient_says_so():
    found = judged("grad_update_norm", 0.5, None)
    message = failed(found, "gate-gradient", "grad_update_norm").message
    assert "differs at 1 of 8 sites (block 2)" in message
    assert "no value instead of 0.5 (nothing reaches it, or it could not be observed)" in message


def test_what_passes_is_said_in_the_direction_of_the_change():
    """5 % more is 4.76 % less: 1 / 1.05."""
    less = failed(judged("update_rms", 1.0, 0.951), "gate-stream").message
    more = failed(judged("update_rms", 1.0, 1.06), "gate-stream").message
    assert less.endswith("(-4.9 %, limit -4.76 %).")
    assert more.endswith("(+6 %, limit +5 %).")


# ------------------------------------------------------------------ where it starts


def places(found):
    return None if found.start is None else (found.start.site, found.start.parameter)


def test_the_start_is_the_first_place_of_the_forward_pass_whatever_else_differs():
    rows = additive(4)
    rows[3] = dataclasses.replace(rows[3], update_rms=9.0)
    rows[5] = dataclasses.replace(rows[5], stream_rms=9.0)
    rows[7] = dataclasses.replace(rows[7], grad_stream_norm=9.0)
    assert places(gate(run_of(rows), run_of(additive(4)), Tolerances())) == (3, None)


def test_where_gradients_alone_differ_it_is_the_last_place_and_a_parameter_there():
    rows = additive(4)
    for index in (1, 5):
        rows[index] = dataclasses.replace(rows[index], param_grad_norm=9.0)
    wrong = [parameter(f"layers.{i}.up", site=2 * i + 1, block=i, grad_norm=9.0 if i in (0, 2) else 0.1) for i in range(4)]
    right = [dataclasses.replace(one, grad_norm=0.1) for one in wrong]
    assert places(gate(run_of(rows, wrong), run_of(additive(4), right), Tolerances())) == (5, "layers.2.up")


def test_a_head_lies_behind_all_sites_and_an_embedding_before_them():
    rows = [dataclasses.replace(one, grad_stream_norm=2 * one.grad_stream_norm) for one in additive(4)]
    right = [parameter("head"), parameter("embed", role="embedding")]
    wrong = [dataclasses.replace(one, grad_norm=0.2) for one in right]
    assert places(gate(run_of(rows, wrong), run_of(additive(4), right), Tolerances())) == (None, "head")
    assert places(gate(run_of(rows, [right[0], wrong[1]]), run_of(additive(4), right), Tolerances())) == (7, None)


def test_a_parameter_of_no_branch_lies_at_the_end_of_its_block():
    right = [parameter(f"layers.{i}.scale", block=i) for i in range(4)]
    wrong = [dataclasses.replace(one, grad_norm=0.2 if one.block < 3 else 0.1) for one in right]
    found = gate(run_of(additive(4), wrong), run_of(additive(4), right), Tolerances())
    assert failed(found, "gate-gradient").site.parameter == "layers.2.scale"
    assert places(found) == (None, "layers.2.scale")


def test_nothing_starts_where_nothing_changed_or_where_the_loss_alone_did():
    assert judged("loss", 7.0, 7.0).start is None
    assert judged("loss", 7.0, 8.0).start is None


# ------------------------------------------------------------------ rounding


@pytest.mark.parametrize(
    ("precision", "shape", "moved", "passes"),
    [
        ("bf16", (256,), 3.8e-4, True),  # a tenth of 2^-8 x 1.0 = 3.9e-4
        ("bf16", (256,), 4.0e-4, False),
        ("bf16", (256, 256), 3.8e-4, False),  # products add up in fp32
        ("fp16", (256,), 4.8e-5, True),  # a tenth of 2^-11 = 4.88e-5
        ("fp16", (256,), 5.0e-5, False),
        ("fp32", (256,), 1.1e-8, True),  # a tenth of 2^-23 = 1.19e-8
        ("fp32", (256,), 1.3e-8, False),
    ],
)
def test_what_rounding_leaves_of_a_vectors_gradient_is_taken_for_zero(precision, shape, moved, passes):
    tiny = 1e-9  # a sum that is zero in exact arithmetic
    for one, other in ((tiny, moved), (moved, tiny), (0.0, moved), (moved, 0.0)):
        found = gate(of_vector(one, precision, shape), of_vector(other, precision, shape), Tolerances())
        assert found.passed == passes


@pytest.mark.parametrize(
    ("precision", "shape", "value", "passes"),
    [
        ("bf16", (256,), 0.149, True),
        ("bf16", (256,), 0.151, False),
        ("bf16", (256,), 0.0, False),  # zero is no rounding
        ("bf16", (16, 16), 0.106, False),
        ("bf16-mixed", (256,), 0.149, True),
        ("fp32", (256,), 0.104, True),
        ("fp32", (256,), 0.106, False),
    ],
)
def test_a_vectors_gradient_may_move_by_half_where_kernels_add_up_in_half_precision(precision, shape, value, passes):
    before = of_vector(0.1, precision, shape)
    assert gate(of_vector(value, precision, shape), before, Tolerances()).passed == passes
    assert gate(before, of_vector(value, precision, shape), Tolerances()).passed == passes


def of_vector(value, precision, shape):
    """A run whose branches have a gradient of 1, and this parameter one of ``value``."""
    rows = [dataclasses.replace(one, param_grad_norm=1.0) for one in additive(4)]
    rest = [parameter("layers.2.key.bias", site=5, block=2, shape=shape, grad_norm=value)]
    return run_of(rows, rest, precision=precision)


# ------------------------------------------------------------------ seeds


def of_seeds(factor=1.0, scatter=0.02, seeds=5):
    """Runs whose values scatter about 1 by this, in logarithms, symmetrically; ``factor`` is at site 3's update."""
    rows = []
    for seed in range(seeds):
        away = math.exp(scatter * (seed - (seeds - 1) / 2))
        for one in additive(4, seed=seed):
            scaled = {name: getattr(one, name) * away for name in EVERY}
            scaled["update_rms"] *= factor if one.site == 3 else 1.0
            rows.append(dataclasses.replace(one, **scaled))
    losses = tuple(7.0 + 0.01 * seed for seed in range(seeds))
    return with_loss(run_of(rows, seeds=tuple(range(seeds))), by_seed=losses)


def with_loss(run, **changes):
    return dataclasses.replace(run, loss=dataclasses.replace(run.loss, **changes))


def test_with_seeds_the_tolerance_is_what_chance_does():
    """0.1 x (-2 .. 2): a standard deviation of 0.1581; 5.041 x 0.1581 x sqrt(2/5) = 0.5041, a factor of 1.656."""
    baseline = of_seeds(scatter=0.1)
    assert gate(of_seeds(1.65, scatter=0.1), baseline, Tolerances()).passed
    found = gate(of_seeds(1.66, scatter=0.1), baseline, Tolerances())
    (one,) = found.differences
    assert (one.quantity, one.place.site) == ("update_rms", 3)
    assert one.ratio == pytest.approx(1.66)
    assert one.tolerance == pytest.approx(math.exp(0.5041), rel=1e-3)


def test_seeds_that_hardly_scatter_are_judged_by_the_share():
    assert not gate(of_seeds(1.06, scatter=1e-4), of_seeds(scatter=1e-4), Tolerances()).passed
    assert gate(of_seeds(1.04, scatter=1e-4), of_seeds(scatter=1e-4), Tolerances()).passed


def test_a_nan_in_one_seed_of_five_fails():
    run = of_seeds()
    rows = list(run.sites)
    rows[11] = dataclasses.replace(rows[11], update_rms=NAN)
    found = gate(dataclasses.replace(run, sites=tuple(rows)), of_seeds(), Tolerances())
    assert failures(found) == {"gate-nonfinite"}
    assert found.start.site == rows[11].site


def test_a_nan_in_the_loss_of_one_seed_fails():
    run = of_seeds()
    losses = (*run.loss.by_seed[:4], NAN)
    found = gate(with_loss(run, by_seed=losses), of_seeds(), Tolerances())
    assert failures(found) == {"gate-nonfinite"}


# ------------------------------------------------------------------ other draws of the weights


def renamed(factor=1.0, *, loss=7.0, grad=0.1, name="new", cross_entropy=True):
    rows = additive(4)
    rows[3] = dataclasses.replace(rows[3], update_rms=rows[3].update_rms * factor)
    run = run_of(rows, [parameter(f"{name}.{i}", site=2 * i + 1, block=i, grad_norm=grad) for i in range(4)], loss=loss)
    return run if cross_entropy else with_loss(run, uniform=None)


def test_one_seed_of_other_draws_is_judged_widely_and_says_so():
    before = renamed(name="old")
    assert gate(renamed(ONE_SEED_FACTOR - 0.01), before, Tolerances()).passed
    found = gate(renamed(ONE_SEED_FACTOR + 0.01), before, Tolerances())
    assert failures(found) == {"gate-stream"}
    (note,) = found.notes
    assert note.startswith("4 of 4 random parameters have new random values")
    assert "--seeds 0..4" in note
    assert not gate(renamed(1.06, name="old"), before, Tolerances()).passed  # the same draws


def test_the_loss_of_other_draws_is_judged_more_closely():
    before = renamed(name="old")
    assert gate(renamed(loss=7.0 * (ONE_SEED_LOSS_FACTOR - 0.01)), before, Tolerances()).passed
    assert failures(gate(renamed(loss=7.0 * (ONE_SEED_LOSS_FACTOR + 0.01)), before, Tolerances())) == {"gate-loss"}


def test_single_parameters_of_other_draws_count_by_whether_they_have_a_gradient():
    before = renamed(name="old")
    assert gate(renamed(grad=100.0), before, Tolerances()).passed
    assert failures(gate(renamed(grad=None), before, Tolerances())) == {"gate-gradient"}
    assert failures(gate(renamed(grad=0.0), before, Tolerances())) == {"gate-gradient"}
    assert failures(gate(renamed(grad=NAN), before, Tolerances())) == {"gate-nonfinite"}


def test_a_loss_that_is_no_cross_entropy_is_not_compared_with_that_of_other_draws():
    """It may be a sum of either sign; of the same draws it is compared."""
    before = renamed(name="old", cross_entropy=False, loss=0.02)
    found = gate(renamed(cross_entropy=False, loss=-0.3), before, Tolerances())
    assert found.passed
    assert any("The loss is not a cross-entropy" in note for note in found.notes)
    assert not gate(renamed(name="old", cross_entropy=False, loss=-0.3), before, Tolerances()).passed
    assert failures(gate(renamed(cross_entropy=False, loss=NAN), before, Tolerances())) == {"gate-nonfinite"}
