"""PC106: the gain of norms, and reads of the stream past them."""

import dataclasses
import math

import pytest
from synthetic import additive, norm, parameter, run_of

from propcheck.rules import judge


def judged(*norms, sites=None, parameters=(), **changes):
    return judge(run_of(sites or additive(4), parameters, norms=norms, **changes), select=["PC106"])


@pytest.mark.parametrize("gain", [2.0, 30.0, 0.5, 0.02, 0.0])
def test_a_gain_that_is_off_either_way_is_one_finding_for_all_blocks(gain):
    (finding,) = judged(*(norm(n, gain=gain, input_rms=1.0) for n in (1, 2)))
    assert (finding.severity, finding.value, finding.expected) == ("warning", gain, 1.0)
    assert finding.message.startswith("The 2 norms blocks.*.input_norm.weight (blocks 1 to 2) apply a gain of RMS")
    assert (finding.site.block, finding.site.parameter) == (1, "blocks.1.input_norm.weight")


def test_ones_in_a_norm_that_adds_1_are_said_to_be_so():
    ones = {"role": "norm", "numel": 5120, "mean": 1.0, "std": 0.0, "init_calls": "fill_(1)"}
    weights = [parameter(f"blocks.{n}.input_norm.weight", **ones) for n in (0, 1)]
    (finding,) = judged(norm(0, gain=2.0), norm(1, gain=2.0), parameters=weights)
    assert "The gain is applied as 1 + weight, and the weight starts at 1 (fill_(1))." in finding.message
    (finding,) = judged(norm(0, gain=2.0, parameter=None), norm(1), parameters=weights)
    assert "The gain is applied as 1 + weight" in finding.message
    plain = [dataclasses.replace(one, mean=2.0) for one in weights]
    (finding,) = judged(norm(0, gain=2.0), norm(1, gain=2.0), parameters=plain)
    assert "1 + weight" not in finding.message


def test_each_kind_of_norm_is_a_finding():
    norms = [norm(n, name, gain=2.0, number=10 * n + i) for n in range(3) for i, name in enumerate(("input_norm", "mlp_norm"))]
    first, second = judged(*norms)
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
    assert not judged(norm(3, **changes))


def test_a_large_gain_on_what_is_written_is_found_and_one_inside_is_a_note():
    (finding,) = judged(norm(1, gain=3.0, place="written"))
    assert finding.severity == "warning"
    (finding,) = judged(norm(1, "q_norm", gain=10.0, place="inside", width=128))
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
    assert bool(judged(norm(1, gain=9.0), parameters=[weight])) == found


def test_of_several_seeds_the_median_gain_is_judged():
    assert not judged(*(norm(1, gain=g, seed=s) for s, g in enumerate((1.0, 1.1, 9.0))))
    assert judged(*(norm(1, gain=g, seed=s) for s, g in enumerate((1.0, 3.0, 9.0))))[0].value == 3.0


def bare(records, *, at=(0,), output=1.0, **changes):
    return [
        dataclasses.replace(r, bare_read=r.site in at, norm_output_rms=output, **(changes if r.site in at else {}))
        for r in records
    ]


def test_attention_that_reads_the_stream_past_its_norm_at_another_scale_is_a_note():
    # Keys and values hardly do so on purpose, but the gate of a highway network does, and both are one flag in the records.
    sites = bare(additive(4, embedding=50.0), at=(0, 2, 4, 6))
    (finding,) = judged(sites=sites)
    assert finding.severity == "note"
    assert finding.site.sublayer == "attention"
    assert finding.value == pytest.approx(50, rel=0.01)
    assert "through its norm, at RMS 1, and also directly, at RMS 50" in finding.message
    assert "3 more sites" in finding.message
    assert "A gate or a router may do this on purpose" in finding.message


@pytest.mark.parametrize("changes", [{"bare_read": None}, {"bare_read": False}, {"norm_output_rms": None}, {"stream_rms": 1.2}])
def test_a_read_past_the_norm_at_its_own_scale_or_none_at_all_is_silent(changes):
    sites = [dataclasses.replace(r, **changes) for r in bare(additive(4, embedding=50.0), at=(0,))]
    assert not judged(sites=sites[:1])


def test_runs_from_before_norms_were_recorded_are_silent():
    assert not judged()
