"""What a gate makes of weights that are drawn otherwise: the same draw at another scale, a new one, one among many."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gated import failures, gate, scan
from synthetic import additive, parameter, run_of, site
from torch import nn
from toy import STD, Decoder, gpt2

import propcheck
from propcheck.comparison.compare import compare
from propcheck.comparison.gate import gate as judge
from propcheck.comparison.match_parameters import count_redrawn, match_parameters
from propcheck.config.tolerances import Tolerances


def of_std(factor, dtype):
    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=factor * STD)

    def build():
        torch.set_default_dtype(dtype)
        try:
            return Decoder(blocks=4, init=init, tied=False)
        finally:
            torch.set_default_dtype(torch.float32)

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1.05, 1.3, 1.7])
def test_the_same_draw_at_another_scale_is_the_same_in_half_precision_too(factor, dtype):
    one, other = (scan(of_std(scale, dtype)).record.parameters for scale in (1.0, factor))
    assert count_redrawn(match_parameters(one, other, [])) == (0, 30)  # 7 weights a block, the embedding and the head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_seed_is_told_by_nearly_every_weight(dtype):
    one, other = (scan(of_std(1.0, dtype), seeds=seed).record.parameters for seed in (0, 1))
    assert count_redrawn(match_parameters(one, other, []))[0] >= 28


def uniform_in_one(bound):
    """Another draw for one weight of the third block; +-.0346 has the std of .02 that the others have."""

    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name == "layers.2.mlp.up":
            nn.init.uniform_(module.weight, -bound, bound)

    return lambda: Decoder(blocks=4, init=init)


def test_one_weight_that_is_drawn_anew_passes_if_it_is_of_its_size_and_fails_by_its_name_if_not():
    before = uniform_in_one(0.02 * 3**0.5)
    plain = lambda: Decoder(blocks=4, init=gpt2)  # noqa: E731
    assert gate(before, plain).passed
    found = gate(uniform_in_one(0.06), plain)
    assert failures(found) == {"gate-init", "gate-findings"}  # and PC104 holds it against its siblings
    assert [one.place.parameter for one in found.differences] == ["layers.2.mlp.up.weight"]
    assert found.start.parameter == "layers.2.mlp.up.weight"


def test_several_seeds_say_how_much_one_redrawn_weight_lets_pass():
    seeds = (0, 1, 2, 3, 4)
    baseline = scan(lambda: Decoder(blocks=4, init=gpt2), seeds=seeds)
    run = scan(uniform_in_one(0.02 * 3**0.5), seeds=seeds)
    found = propcheck.gate(run, baseline)
    assert found.passed
    assert any(note.startswith("1 of 29 random parameters have new random values") for note in found.record.notes)
    # By the ratio seed by seed: in other branches than its own hardly anything moves.
    assert found.record.allowed["update_rms"][1] < 1.2


def test_the_seeds_that_both_have_are_compared():
    def run(seeds, second):
        rows = [row for seed in seeds for row in additive(2, seed=seed, updates=(0.3, second if seed == 1 else 1.0))]
        return run_of(rows, [parameter("x.weight", site=0, block=0)], seeds=seeds)

    comparison = compare([run((0,), 1.0), run((0, 1), 5.0)], Tolerances())
    (contrast,) = comparison.contrasts
    assert not any(change.differing for change in contrast.changes)
    assert "Compared over the shared seeds: 0." in contrast.notes
    assert all(change.allowed[1] < 1.06 for change in contrast.changes)


def test_a_mean_loss_is_of_no_seed_that_both_have():
    """Runs from before each seed's loss was kept have the mean alone, which zip would hand to the first seed."""

    def run(seeds):
        rows = [row for seed in seeds for row in additive(2, seed=seed)]
        return run_of(rows, [parameter("x.weight", site=0, block=0)], seeds=seeds)

    (contrast,) = compare([run((0, 1)), run((2, 1))], Tolerances()).contrasts
    assert "loss" not in [change.quantity for change in contrast.changes]


def test_a_nan_in_both_is_no_difference_to_a_comparison_and_a_failure_to_a_gate():
    rows = [site(0, 0, "attention"), site(1, 0, "mlp", update=float("nan"), total=float("nan"))]
    broken = run_of(rows, [parameter("x.weight")])
    (contrast,) = compare([broken, broken], Tolerances()).contrasts
    assert (contrast.start, [change.differing for change in contrast.changes if change.differing]) == (None, [])
    assert failures(judge(broken, broken, Tolerances())) == {"gate-nonfinite"}


def test_loosening_one_quantity_makes_no_new_finding_a_note():
    baseline = scan(lambda: Decoder(blocks=4, init=gpt2))
    faulty = scan(of_std(1.0, torch.float32))  # its residual projections are not divided
    for tolerance in (None, {"loss": "900%"}, {"layers.1.*": "900%"}):
        found = propcheck.gate(faulty, baseline, tolerance=tolerance)
        assert not found.passed
    one = dataclasses.replace(Tolerances(), modules={"no.such.*": 0.2})
    assert "No module or parameter matches the tolerance for no.such.*." in judge(baseline.record, baseline.record, one).notes
