"""PC306: the gradient at one addition against its neighbours."""

import dataclasses
import math

import pytest
from synthetic import additive, factors, post_norm, qwen, run_of, with_gradient

from propcheck.records import Doubling
from propcheck.rules import judge


def with_step(records, at, *, over=1.0, link=1.0):
    """Let the gradient grow by ``over`` at an addition, on top of what it does, by ``link`` before it."""
    changed = []
    for record in records:
        stream = over if record.site == at else over * link if record.site < at else 1.0
        total = over * link if record.site < at else 1.0
        changed.append(with_gradient(record, record.grad_stream_norm * stream, record.grad_sum_norm * total))
    return changed


def judged(records, select=("PC306",), **changes):
    return judge(run_of(records, **changes), select=select)


@pytest.mark.parametrize(
    "records",
    [
        additive(16),
        additive(16, embedding=0.02),
        additive(12, gains=(1.0, 2.8)),
        qwen(),
        post_norm(12),
        factors(16, forward=1.5, backward=1.5),
        factors(16, backward=0.7),
    ],
)
def test_gradients_that_go_the_same_way_in_each_block_are_silent(records):
    assert judged(records) == ()


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_step_over_one_addition_is_found_there(factor):
    (finding,) = judged(with_step(additive(16), 11, over=factor))
    assert (finding.severity, finding.site.site, finding.site.block) == ("warning" if factor < 1 else "note", 11, 5)
    # What the update itself explains of it: S = 1 + 5.5 * 0.09 + 5 * 1, sqrt(1 + 2.04 / S) = 1.15.
    assert finding.value == pytest.approx(1.15 * factor, rel=0.01)
    assert finding.expected == pytest.approx(1.15, rel=0.02) if factor > 1 else finding.expected == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_step_between_two_additions_is_found_behind_it(factor):
    (finding,) = judged(with_step(additive(16), 11, link=factor))
    assert (finding.site.site, finding.value) == (11, pytest.approx(factor))
    assert finding.expected == pytest.approx(1.0)
    assert "between site 11 (mlp of block 5) and the addition before it the gradient goes from" in finding.message


def test_growth_over_one_addition_is_the_branchs_where_its_parameters_show_it():
    records = with_step([dataclasses.replace(r, param_grad_norm=r.grad_sum_norm) for r in additive(16)], 11, over=3.0)
    (other,) = judged(records)
    assert other.severity == "note"
    assert "Another reader of the stream (a loss or a head on an inner block, which is no fault) may add this." in other.message
    assert other.remedy.startswith("Nothing, if something else reads the stream there")
    records[11] = dataclasses.replace(records[11], param_grad_norm=3 * records[11].param_grad_norm)
    (own,) = judged(records)
    assert (own.severity, own.site.site) == ("warning", 11)
    assert "reader" not in own.message
    assert "reads the stream" not in own.remedy


def test_growth_between_two_additions_may_be_another_readers():
    (finding,) = judged(with_step(additive(16), 11, link=3.0))
    assert finding.severity == "note"
    (finding,) = judged(with_step(additive(16), 11, link=1 / 3))
    assert finding.severity == "warning"


def test_a_step_of_x1_is_not_out_of_line_because_its_siblings_are():
    records = additive(16)
    for at in range(5, 32, 4):  # another reader before every second block
        records = with_step(records, at, over=3.0)
    assert {finding.severity for finding in judged(records)} <= {"note"}


def detached(at):
    """Sums that say which one they continue; at one of them no gradient arrives at the stream."""
    records = [dataclasses.replace(r, continues=r.site - 1 if r.site else None) for r in additive(16)]
    records[at] = dataclasses.replace(records[at], grad_stream_norm=None)
    return records


@pytest.mark.parametrize("at", [1, 2, 11, 30, 31])
def test_a_stream_that_is_detached_at_one_addition_is_found_there(at):
    (finding,) = judged(detached(at))
    assert (finding.severity, finding.site.site, finding.value) == ("warning", at, "none")
    assert "the sum there has a gradient of" in finding.message


def test_one_that_is_detached_in_every_block_is_one_finding():
    records = [dataclasses.replace(r, grad_stream_norm=None if r.site % 2 else r.grad_stream_norm) for r in detached(11)]
    (finding,) = judged(records)
    assert finding.site.site == 1
    assert "The same holds at 15 more sites." in finding.message


def test_a_stream_without_a_gradient_is_silent_where_nothing_was_to_get_one():
    assert judged(detached(0)) == ()  # a frozen embedding
    frozen = [with_gradient(r, None, None) if r.site < 11 else r for r in detached(11)]
    assert judged(frozen) == ()


def test_a_step_that_the_update_explains_is_silent():
    """An update as large as the stream, in one block of sixteen: sqrt(1 + 2.04) = 1.74 where its neighbours have 1.1."""
    records = additive(16)
    large = dataclasses.replace(records[23], update_ratio=1.0)
    factor = math.sqrt(1 + 2.04) / (records[23].grad_stream_norm / records[23].grad_sum_norm)
    records = with_step([large if r.site == 23 else r for r in records], 23, over=factor)
    assert judged(records) == ()


@pytest.mark.parametrize("factor", [5.0, 1 / 5])
def test_a_step_in_the_last_block_is_told_by_those_before_it(factor):
    for at in (30, 31):
        (finding,) = judged(with_step(additive(16), at, over=factor))
        assert (finding.site.site, finding.site.block) == (at, 15)
    (finding,) = judged(with_step(additive(16), 31, link=factor))
    assert finding.site.site == 31


def test_the_first_two_blocks_are_not_judged():
    for at in (0, 1, 2, 3):
        assert judged(with_step(additive(16), at, over=5.0)) == ()
    for at in (1, 2, 3):
        assert judged(with_step(additive(16), at, link=5.0)) == ()


def test_where_a_new_regime_begins_is_no_step():
    records = additive(16)
    for at in range(16, 32):
        records = with_step(records, at, over=2.0)
    assert judged(records) == ()


def test_gradients_that_were_not_observed_or_are_zero_are_silent():
    for value in (None, 0.0, math.inf):
        records = [with_gradient(r, value, value) if r.site == 11 else r for r in additive(16)]
        assert judged(records) == ()


def jumped(records, at, factor):
    """The same streams, larger by ``factor`` from the operand of one addition on."""
    names = ("stream_rms", "update_rms", "sum_rms")
    return [
        dataclasses.replace(r, **{name: getattr(r, name) * factor for name in names}) if r.site >= at else r for r in records
    ]


def test_a_factor_on_the_stream_is_one_on_the_gradient():
    for factor in (1 / 20, 1 / 1.4, 1.4, 20.0):  # as of a norm that is taken of the stream in one block
        records = jumped(with_step(additive(16), 11, link=factor), 11, factor)
        assert judged(records) == ()
        assert [f.rule for f in judged(records, select=("PC205", "PC306"))] == (["PC205"] if abs(math.log(factor)) > 1 else [])


def test_a_step_beside_a_jump_of_the_stream_is_folded_under_it():
    records = jumped(with_step(additive(16), 11, link=8.0), 11, 2.0)
    (finding,) = judged(records, select=("PC205", "PC306"))
    assert (finding.rule, finding.also) == ("PC205", ("PC306 at 1 site",))
    doublings = (Doubling(site=11, block=5, module="blocks.5"),)
    (finding,) = judged(records, select=("PC205", "PC206", "PC306"), doublings=doublings)
    assert (finding.rule, finding.also) == ("PC206", ("PC205 at 1 site", "PC306 at 1 site"))
