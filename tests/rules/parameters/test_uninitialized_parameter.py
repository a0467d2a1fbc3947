"""PC102: parameters and buffers that no call wrote."""

import pytest
from synthetic import judging, parameter

UNTRAINED = {"kind": "buffer", "requires_grad": False, "grad_state": None, "role": None}


judged = judging("PC102", blocks=0)


def test_a_parameter_that_was_never_written_is_an_error():
    (finding,) = judged(parameter("scales", init_calls=None), parameter("weight"))
    assert finding.severity == "error"
    assert finding.site.parameter == "scales"
    assert "The parameter scales was never initialised" in finding.message


def test_so_is_a_buffer_that_something_reads():
    for used in (True, None):
        (finding,) = judged(parameter("scales", init_calls=None, used=used, **UNTRAINED))
        assert "The buffer scales" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"init_calls": "fill_(1)"},
        {"init_calls": ""},
        {"init_calls": None, "shape": (0, 8), "numel": 0},
        {"init_calls": None, "used": False, **UNTRAINED},  # a workspace
    ],
)
def test_what_was_written_and_what_nothing_reads_is_silent(changes):
    assert not judged(parameter("scales", **changes))


def test_many_names_without_a_value_are_one_finding():
    names = [f"blocks.{block}.{name}" for block in range(4) for name in "abcdefg"]
    (finding,) = judged(*(parameter(name, init_calls=None, block=int(name[7])) for name in names))
    assert "The 28 parameters blocks.*.a, blocks.*.b" in finding.message
    assert "and 2 more names (blocks 0 to 3) were never initialised" in finding.message
    assert "336 elements" in finding.message
