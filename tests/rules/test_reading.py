"""PC106 and PC208, on numbers by hand."""

import dataclasses
import math
import random

import pytest
from synthetic import additive, parameter, run_of

from propcheck.records import NormRecord
from propcheck.rules import judge
from propcheck.rules.sites import place_of


def norm(at, name="input_norm", *, place="read", gain=1.0, seed=0, number=None, **changes):
    """The norm of the attention (site 2 * block) or, in other places, of what is asked for."""
    module = f"blocks.{at}.{name}"
    fields = {
        "site": 2 * at,
        "block": at,
        "kind": "mean_square",
        "dtype": "float32",
        "width": 5120,
        "eps": 1e-6,
        "input_rms": 1.0,
        "input_absmax": 4.0,
        "output_rms": gain,
        "epsilon_share": 0.0,
        "zero_share": 0.0,
        "parameter": f"{module}.weight",
        **changes,
    }
    number = 2 * at if number is None else number
    return NormRecord(seed=seed, norm=number, place=place, module=module, gain=gain, **fields)


def judged(*norms, rule, sites=None, parameters=(), **changes):
    return judge(run_of(sites or additive(4), parameters, norms=norms, **changes), select=[rule])


# PC106


@pytest.mark.parametrize("gain", [2.0, 30.0, 0.5, 0.02, 0.0])
def test_a_gain_that_is_off_either_way_is_one_finding_for_all_blocks(gain):
    (finding,) = judged(*(norm(n, gain=gain, input_rms=1.0) for n in (1, 2)), rule="PC106")
    assert (finding.severity, finding.value, finding.expected) == ("warning", gain, 1.0)
    assert finding.message.startswith("The 2 norms blocks.*.input_norm.weight (blocks 1 to 2) apply a gain of RMS")
    assert (finding.site.block, finding.site.parameter) == (1, "blocks.1.input_norm.weight")


def test_ones_in_a_norm_that_adds_1_are_said_to_be_so():
    ones = {"role": "norm", "numel": 5120, "mean": 1.0, "std": 0.0, "init_calls": "fill_(1)"}
    weights = [parameter(f"blocks.{n}.input_norm.weight", **ones) for n in (0, 1)]
    (finding,) = judged(norm(0, gain=2.0), norm(1, gain=2.0), rule="PC106", parameters=weights)
    assert "It is applied as 1 + weight, and the weight starts at 1 (fill_(1))." in finding.message
    (finding,) = judged(norm(0, gain=2.0, parameter=None), norm(1), rule="PC106", parameters=weights)
    assert "It is applied as 1 + weight" in finding.message
    plain = [dataclasses.replace(one, mean=2.0) for one in weights]
    (finding,) = judged(norm(0, gain=2.0), norm(1, gain=2.0), rule="PC106", parameters=plain)
    assert "1 + weight" not in finding.message


def test_each_kind_of_norm_is_a_finding():
    norms = [norm(n, name, gain=2.0, number=10 * n + i) for n in range(3) for i, name in enumerate(("input_norm", "mlp_norm"))]
    first, second = judged(*norms, rule="PC106")
    assert first.message.startswith("The 3 norms blocks.*.input_norm.weight (blocks 0 to 2)")
    assert second.message.startswith("The 3 norms blocks.*.mlp_norm.weight (blocks 0 to 2)")


@pytest.mark.parametrize(
    "changes",
    [
        {"gain": 1.0},
        {"gain": 1.4},
        {"gain": 0.7},
        {"gain": None},  # it has none
        {"gain": math.nan},  # PC101 reports it
        {"gain": 0.1, "place": "written"},  # a residual scale
        {"gain": 0.0, "place": "written"},
        {"gain": 5120**0.5, "kind": "length"},  # undoes a normalisation to length 1
        {"gain": 0.5, "block": 3},  # 1 / sqrt(4): LayerNorm Scaling
    ],
)
def test_a_gain_that_can_be_right_is_silent(changes):
    assert not judged(norm(3, **changes), rule="PC106")


def test_a_large_gain_on_what_is_written_is_found_and_one_inside_is_a_note():
    (finding,) = judged(norm(1, gain=3.0, place="written"), rule="PC106")
    assert finding.severity == "warning"
    (finding,) = judged(norm(1, "q_norm", gain=10.0, place="inside", width=128), rule="PC106")
    assert finding.severity == "note"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"numel": 5120}, True),
        ({"numel": 10240}, True),  # of groups
        ({"numel": 5120, "init_calls": None}, False),  # PC102 reports it
        ({"numel": 1}, False),  # what scales the result, or parts of it, as a whole is no gain
        ({"numel": 3}, False),
    ],
)
def test_a_gain_is_judged_if_it_was_written_and_is_one(changes, found):
    weight = parameter("blocks.1.input_norm.weight", **{"init_calls": "fill_(9)", "mean": 9.0, "std": 0.0, **changes})
    assert bool(judged(norm(1, gain=9.0), rule="PC106", parameters=[weight])) == found


def test_of_several_seeds_the_median_gain_is_judged():
    assert not judged(*(norm(1, gain=g, seed=s) for s, g in enumerate((1.0, 1.1, 9.0))), rule="PC106")
    assert judged(*(norm(1, gain=g, seed=s) for s, g in enumerate((1.0, 3.0, 9.0))), rule="PC106")[0].value == 3.0


def bare(records, *, at=(0,), output=1.0, **changes):
    return [
        dataclasses.replace(r, bare_read=r.site in at, norm_output_rms=output, **(changes if r.site in at else {}))
        for r in records
    ]


def test_attention_that_reads_the_stream_past_its_norm_at_another_scale_is_a_note():
    # Keys and values hardly do so on purpose, but the gate of a highway network does, and both are one flag in the records.
    sites = bare(additive(4, embedding=50.0), at=(0, 2, 4, 6))
    (finding,) = judged(rule="PC106", sites=sites)
    assert finding.severity == "note"
    assert finding.site.sublayer == "attention"
    assert finding.value == pytest.approx(50, rel=0.01)
    assert "through its norm, at RMS 1, and also past it, at RMS 50" in finding.message
    assert "3 more sites" in finding.message
    assert "A gate or a router may read it so on purpose" in finding.message


@pytest.mark.parametrize("changes", [{"bare_read": None}, {"bare_read": False}, {"norm_output_rms": None}, {"stream_rms": 1.2}])
def test_a_read_past_the_norm_at_its_own_scale_or_none_at_all_is_silent(changes):
    sites = [dataclasses.replace(r, **changes) for r in bare(additive(4, embedding=50.0), at=(0,))]
    assert not judged(rule="PC106", sites=sites[:1])


# PC208


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
    (finding,) = judged(*(deltanet(n) for n in range(4)), rule="PC208", sites=sites, parameters=convolutions)
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
    (finding,) = judged(deltanet(1), rule="PC208", parameters=[convolution(1, **changes)])
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
    assert not judged(deltanet(1, **changes), rule="PC208")


@pytest.mark.parametrize(("mean_square", "found"), [(4.0, False), (1.1, False), (0.9, True)])
def test_a_norm_that_is_damped_but_ruled_by_its_signal_is_silent(mean_square, found):
    # A mean square of m eps leaves sqrt(m / (m + 1)) of the gain, 3: at m = 1 they weigh the same.
    output = 3 * math.sqrt(mean_square / (mean_square + 1))
    findings = judged(deltanet(1, input_rms=1e-3 * mean_square**0.5, output_rms=output, gain=3.0), rule="PC208")
    assert bool(findings) == found


def test_a_normalisation_to_length_1_is_judged_by_the_sum_of_squares():
    # RMS 1e-4 over 100 elements: length 1e-3, as much as the root of the eps; 1 / sqrt(2) of 1 / sqrt(100) is left.
    changes = {"kind": "length", "width": 100, "gain": None, "parameter": None, "input_rms": 5e-5}
    (finding,) = judged(deltanet(1, output_rms=0.0447, **changes), rule="PC208")
    assert finding.severity == "warning"
    assert "vectors of length 5e-4 in block 1, where the root of eps is 0.001" in finding.message
    assert "the sum of squares is below 10 eps" in finding.message
    assert "RMS 0.0447, where without eps it would be 0.1 (1 / root of the width)" in finding.message
    assert finding.message.startswith("The norm in blocks.1.linear_attn.norm reads")


def test_an_output_that_was_not_seen_is_told_by_the_law():
    # sqrt(s / (s + eps)) at s = eps / 4.
    (finding,) = judged(deltanet(1, input_rms=5e-4, output_rms=None), rule="PC208")
    assert "about x0.447 of what it would be without eps" in finding.message


def test_a_norm_that_reads_zeros_is_a_note():
    (finding,) = judged(deltanet(1, input_rms=0.0, output_rms=0.0), rule="PC208", parameters=[convolution(1)])
    assert finding.severity == "note"
    assert "exactly zero" in finding.message
    assert "convolution" not in finding.message


@pytest.mark.parametrize(("std", "named"), [(1e-4, True), (1.5e-4, True), (0.02, False), (1e-6, False)])
def test_a_small_embedding_is_named_where_the_first_norm_reads_its_scale(std, named):
    table = parameter("embed.weight", role="embedding", std=std, mean=0.0)
    first = {"input_rms": 1e-4, "output_rms": 0.0995, "epsilon_share": 1.0}
    (finding,) = judged(norm(0, **first), norm(1), rule="PC208", parameters=[table])
    assert ("the embedding embed.weight" in finding.message) == named
    (finding,) = judged(norm(0), norm(1, **first), rule="PC208", parameters=[table])
    assert "embedding" not in finding.message


@pytest.mark.parametrize("seed", range(60))
def test_no_value_of_a_norm_breaks_a_rule(seed):
    draw = random.Random(seed)
    odd = [None, math.nan, math.inf, 0.0, 1e-300, 1e300, 1e-4]
    floats = ("eps", "input_rms", "output_rms", "gain", "epsilon_share", "zero_share")
    norms = [
        norm(
            n % 4,
            seed=n // 8,
            number=n,
            place=draw.choice(["read", "inside", "written", "stream", "outside"]),
            kind=draw.choice(["mean_square", "variance", "length"]),
            site=draw.choice([None, n % 8, 99]),
            parameter=draw.choice([None, "a.weight"]),
            **({"epsilon_share": 1.0} | {name: draw.choice(odd) for name in floats if draw.random() < 0.3}),
        )
        for n in range(16)
    ]
    records = [
        dataclasses.replace(r, bare_read=True, norm_output_rms=draw.choice(odd), stream_rms=draw.choice(odd))
        for r in additive(4)
    ]
    for finding in judge(run_of(records, [convolution(1), parameter("a.weight")], norms=norms), select=["PC106", "PC208"]):
        assert finding.message.endswith(".")


def test_runs_from_before_norms_were_recorded_are_silent():
    assert not judged(rule="PC106")
    assert not judged(rule="PC208")
