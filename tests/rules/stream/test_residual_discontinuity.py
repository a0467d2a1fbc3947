"""PC205: one addition compared with its neighbours, and the first block."""

import math

import pytest
from synthetic import broken_rules, factors, post_norm, qwen, run_of, site

from propcheck.rules import judge


def toy(blocks=16, *, at=None, step=math.hypot, entering=lambda stream: stream):
    """The healthy toy decoder (stream 0.021 to about 0.059), with one attention addition replaced."""
    stream, records = 0.021, []
    for number in range(2 * blocks):
        update = (0.005, 0.0128)[number % 2]
        total = math.hypot(stream, update)
        if number == at:
            stream = entering(stream)
            total = step(stream, update)
        records.append(site(number, number // 2, ("attention", "mlp")[number % 2], stream=stream, update=update, total=total))
        stream = total
    return records


def test_the_healthy_toy_is_silent():
    records = toy()
    assert records[-1].sum_rms == pytest.approx(0.059, rel=0.05)
    assert broken_rules(run_of(records)) == []


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        ({"step": lambda stream, update: math.hypot(2 * stream, update)}, 2.0),  # x + x + F
        ({"step": lambda stream, update: 0.42 * stream}, 0.42),  # the residual missing: 0.026 to 0.011
        ({"entering": lambda stream: 1.0}, 1 / 0.038),  # the residual taken after the norm: 0.038 to 1
    ],
)
def test_a_fault_in_one_block_is_found_there_and_nowhere_else(fault, value):
    (finding,) = judge(run_of(toy(at=10, **fault)))
    assert (finding.rule, finding.severity) == ("PC205", "warning")
    assert (finding.site.site, finding.site.block, finding.site.sublayer) == (10, 5, "attention")
    assert finding.value == pytest.approx(value, rel=0.05)
    assert finding.expected == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("at", [2, 3, 30])
def test_a_residual_after_the_norm_is_found_from_the_second_block_to_the_last(at):
    (finding,) = judge(run_of(toy(at=at, entering=lambda stream: 1.0)))
    assert (finding.rule, finding.site.site) == ("PC205", at)
    assert finding.value > 10


def test_before_the_first_addition_it_is_an_embedding_norm():
    assert broken_rules(run_of(toy(at=0, entering=lambda stream: 1.0))) == []


def test_an_update_drawn_too_large_in_one_block_is_found():
    (finding,) = judge(run_of(toy(at=21, step=lambda stream, update: math.hypot(stream, 10 * update))), select=["PC205"])
    assert (finding.site.site, finding.site.sublayer) == (21, "mlp")


def test_where_a_new_regime_begins_is_no_jump():
    records, stream = [], 1.0
    for number in range(32):
        total = stream * (2.0 if number >= 16 else 1.01)
        records.append(site(number, number // 2, stream=stream, total=total))
        stream = total
    assert "PC205" not in broken_rules(run_of(records))


def test_a_steady_explosion_is_no_jump():
    assert "PC205" not in broken_rules(run_of(factors(16, forward=4.0)))


def test_the_stock_qwen_model_gets_its_first_block_named_once_and_no_error():
    findings = judge(run_of(qwen()))
    assert [(f.rule, f.severity) for f in findings] == [("PC205", "warning"), ("PC207", "note")]
    first = findings[0]
    # From the published numbers: embedding 0.02, stream after block 0 3.42 to 3.43; gradient about 90 against 0.00333.
    assert first.value == pytest.approx(3.425 / 0.02, rel=0.01)
    assert first.expected == pytest.approx(math.sqrt(2), rel=0.01)
    assert first.site.block == 0
    for part in ("0.02", "3.43", "x171", "that before block 63 (0.00335)"):
        assert part in first.message


def test_post_norm_with_a_small_embedding_gets_a_note():
    (finding,) = judge(run_of(post_norm(12, embedding=0.02), placement="post"))
    assert (finding.rule, finding.severity) == ("PC205", "note")


def test_parallel_blocks_are_silent():
    records, stream = [], 1.0
    for block in range(12):
        total = math.sqrt(stream**2 + 0.3**2 + 1.0)
        for kind, update in (("attention", 0.3), ("mlp", 1.0)):
            records.append(site(len(records), block, kind, stream=stream, update=update, total=total))
        stream = total
    assert broken_rules(run_of(records)) == []


@pytest.mark.parametrize("blocks", [3, 4, 12])
@pytest.mark.parametrize("embedding", [1e-4, 0.02, 100.0])
@pytest.mark.parametrize("alpha", [1.0, 2.2])
def test_the_first_norm_after_an_embedding_of_any_size_sets_the_scale_and_is_no_jump(blocks, embedding, alpha):
    records = []
    for number in range(2 * blocks):
        stream = alpha * (1.0 if number else embedding)  # N(ax + F), whose updates are small beside the stream
        update = stream * (0.02, 0.05)[number % 2]
        kind = ("attention", "mlp")[number % 2]
        records.append(site(number, number // 2, kind, stream=stream, update=update, placement="deepnorm"))
    severities = [finding.severity for finding in judge(run_of(records, placement="deepnorm"))]
    assert severities == (["note"] if embedding < 1 else [])


def test_one_odd_block_beside_the_last_one_does_not_make_the_last_one_odd():
    # Four blocks: the last mlp is compared with two others alone, of which one is odd.
    records = toy(4, at=5, step=lambda stream, update: math.hypot(5 * stream, update))
    (finding,) = judge(run_of(records), select=["PC205"])
    assert finding.site.site == 5
    assert "adjacent" not in finding.message


def test_the_second_block_after_a_tiny_embedding_is_not_blamed_for_the_embedding():
    # A norm on the first branch damps its update with the embedding, so block 1's attention takes the steep step that block 0
    # should have: x3.7 where later blocks take x1.1. The embedding is to blame, and named.
    stream, records = 0.02, []
    for number in range(32):
        update = 0.01 if number == 0 else 0.27 if number == 1 else 0.96
        total = math.hypot(stream, update)
        records.append(site(number, number // 2, ("attention", "mlp")[number % 2], stream=stream, update=update, total=total))
        stream = total
    found = judge(run_of(records), select={"PC205"})
    assert [finding.site.block for finding in found] == [0]
