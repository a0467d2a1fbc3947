"""PC103: equal rows of a weight."""

import pytest
from synthetic import judging, weight

judged = judging("PC103", blocks=2)


def test_a_weight_filled_with_a_constant_has_only_copies():
    (finding,) = judged(weight(1, duplicate_rows=63, std=0.0, init_calls="fill_(0.02)"))
    assert finding.severity == "warning"
    assert finding.site.parameter == "blocks.1.mlp.up.weight"
    assert "all 64 rows are equal (expected: none)" in finding.message


def test_rows_that_were_copied_are_counted():
    (finding,) = judged(weight(0, duplicate_rows=0), weight(1, duplicate_rows=32))
    assert finding.value == 32
    assert "32 of 64 rows repeat an earlier row" in finding.message


def test_copies_in_many_blocks_are_one_finding():
    (finding,) = judged(*(weight(n, duplicate_rows=32) for n in range(6)))
    assert "The 6 parameters blocks.*.mlp.up.weight (blocks 0 to 5) have equal rows" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"duplicate_rows": 0},
        {"duplicate_rows": 63, "zeros": 2048, "std": 0.0},  # zero-initialised
        {"duplicate_rows": 10, "zeros": 11 * 32},  # eleven zero rows
        {"duplicate_rows": 63, "requires_grad": False},  # fixed
        {"duplicate_rows": 63, "role": "embedding"},  # rows have inputs of their own
        {"duplicate_rows": 63, "role": "convolution", "shape": (64, 1, 32)},  # depthwise
        {"duplicate_rows": 63, "shape": (64, 8, 4)},  # experts copied from one
        {"duplicate_rows": 63, "block": None},  # a head
        {"duplicate_rows": 20, "shape": (512, 4)},  # chance, in bf16
        {"duplicate_rows": None, "shape": (2048,)},
        {"duplicate_rows": 63, "dtype": "uint8"},  # packed
    ],
)
def test_rows_that_may_be_equal_are_silent(changes):
    assert not judged(weight(1, **changes))


def test_a_table_of_states_that_all_channels_share_is_silent():
    # [channels, states], every row 1 ... 16: each row decays another channel.
    shared = weight(1, "mixer.A_log", duplicate_rows=63, init_calls="arange(1, 17), repeat(64, 1), log()")
    assert not judged(shared)
