"""PC208: norms whose eps outweighs their input."""

import dataclasses
import math

import pytest
from synthetic import additive, norm, parameter, run_of

from propcheck.rules import judge
from propcheck.rules.sites import place_of


def judged(*norms, sites=None, parameters=(), **changes):
    return judge(run_of(sites or additive(4), parameters, norms=norms, **changes), select=["PC208"])


def deltanet(at, **changes):
    """The gated norm of a Gated DeltaNet mixer as it was measured at Qwen3.8-27B's initialisation."""
    fields = {"place": "inside", "width": 128, "input_rms": 1.4e-4, "output_rms": 0.12, "epsilon_share": 1.0, **changes}
    return norm(at, "linear_attn.norm", **fields)


def convolution(at, **changes):
    fields = {"role": "convolution", "block": at, "site": 2 * at, "shape": (10240, 1, 4), "fan_in": 4, "std": 0.02, **changes}
    return parameter(f"blocks.{at}.linear_attn.conv1d.weight", **fields)


def test_a_norm_below_its_eps_tells_input_output_branch_and_cause():
    sites = additive(4, embedding=3.42, updates=(0.19, 3.42), kinds=("linear_attention", "mlp"))
    convolutions = [convolution(n) for n in range(4)]
    (finding,) = judged(*(deltanet(n) for n in range(4)), sites=sites, parameters=convolutions)
    assert (finding.severity, finding.value) == ("warning", 1.0)
    assert finding.site == dataclasses.replace(
        place_of(sites[0]), module="blocks.0.linear_attn.norm", parameter="blocks.0.linear_attn.norm.weight"
    )
    for part in (
        "The 4 norms blocks.*.linear_attn.norm.weight (blocks 0 to 3)",
        "RMS 1.4e-4 in block 0, where the root of eps is 0.001",
        "for 100 % of the vectors the mean square is below 10 eps.",
        "eps, not the signal, sets the scale of its output: RMS 0.12, where without eps it would be 1 (the RMS of its gain)",
        "The branch adds RMS 0.19 to a stream of RMS 3.42.",
        # 0.02 sqrt(12) = 0.0693
        "the convolution blocks.0.linear_attn.conv1d.weight has std 0.02, normal_(std=0.02). torch's default for its 4 inputs",
        "has 0.289: its output is x0.0693 of that.",
    ):
        assert part in finding.message


@pytest.mark.parametrize("changes", [{"std": 0.289}, {"std": 0.15}, {"site": 3}, {"role": "linear"}, {"std": None}])
def test_a_cause_that_the_records_do_not_show_is_not_claimed(changes):
    (finding,) = judged(deltanet(1), parameters=[convolution(1, **changes)])
    assert "convolution" not in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon_share": 0.5},  # of the vectors, not more
        {"epsilon_share": None},
        {"eps": None},
        {"input_rms": None},
        {"output_rms": math.nan},
    ],
)
def test_a_norm_whose_input_is_large_enough_or_not_known_is_silent(changes):
    assert not judged(deltanet(1, **changes))


@pytest.mark.parametrize(("mean_square", "found"), [(4.0, False), (1.1, False), (0.9, True)])
def test_a_norm_that_is_damped_but_ruled_by_its_signal_is_silent(mean_square, found):
    # A mean square of m eps leaves sqrt(m / (m + 1)) of the gain, 3: at m = 1 they weigh the same.
    output = 3 * math.sqrt(mean_square / (mean_square + 1))
    findings = judged(deltanet(1, input_rms=1e-3 * mean_square**0.5, output_rms=output, gain=3.0))
    assert bool(findings) == found


def test_a_normalisation_to_length_1_is_judged_by_the_sum_of_squares():
    # RMS 1e-4 over 100 elements: length 1e-3, as much as the root of the eps; 1 / sqrt(2) of 1 / sqrt(100) is left.
    changes = {"kind": "length", "width": 100, "gain": None, "parameter": None, "input_rms": 5e-5}
    (finding,) = judged(deltanet(1, output_rms=0.0447, **changes))
    assert finding.severity == "warning"
    assert "vectors of length 5e-4 in block 1, where the root of eps is 0.001" in finding.message
    assert "the sum of squares is below 10 eps" in finding.message
    assert "RMS 0.0447, where without eps it would be 0.1 (1 / root of the width)" in finding.message
    assert finding.message.startswith("The norm in blocks.1.linear_attn.norm reads")


def test_an_output_that_was_not_seen_is_told_by_the_law():
    # sqrt(s / (s + eps)) at s = eps / 4.
    (finding,) = judged(deltanet(1, input_rms=5e-4, output_rms=None))
    assert "about x0.447 of what it would be without eps" in finding.message


def test_a_norm_that_reads_zeros_is_a_note():
    (finding,) = judged(deltanet(1, input_rms=0.0, output_rms=0.0), parameters=[convolution(1)])
    assert finding.severity == "note"
    assert "exactly zero" in finding.message
    assert "convolution" not in finding.message


@pytest.mark.parametrize(("std", "named"), [(1e-4, True), (1.5e-4, True), (0.02, False), (1e-6, False)])
def test_a_small_embedding_is_named_where_the_first_norm_reads_its_scale(std, named):
    table = parameter("embed.weight", role="embedding", std=std, mean=0.0)
    first = {"input_rms": 1e-4, "output_rms": 0.0995, "epsilon_share": 1.0}
    (finding,) = judged(norm(0, **first), norm(1), parameters=[table])
    assert ("the embedding embed.weight" in finding.message) == named
    (finding,) = judged(norm(0), norm(1, **first), parameters=[table])
    assert "embedding" not in finding.message


def test_runs_from_before_norms_were_recorded_are_silent():
    assert not judged()
