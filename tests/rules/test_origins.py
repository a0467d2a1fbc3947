"""What PC209 and PC305 say of the operation that made the first NaN or infinity."""

import dataclasses
import math

import pytest
from synthetic import additive, parameter, run_of, with_gradient

from propcheck.records import Origin
from propcheck.rules import judge


def origin(**changes):
    fields = {
        "seed": 0, "direction": "forward", "value": "NaN", "function": "softmax", "module": "layers.0.attn", "block": 0,
        "inputs": "scores that are -infinity in whole rows", "tokens": (0, 1, 2, 3), "affected": 4, "positions": 16,
    }  # fmt: skip
    return Origin(**{**fields, **changes})


def message(run, rule):
    (found,) = (one for one in judge(run) if one.rule == rule)
    return found.message


def broken(seed=0):
    records = additive(8, seed=seed)
    return [*records[:7], dataclasses.replace(records[7], nonfinite=40, update_rms=math.nan), *records[8:]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "made by softmax in layers.0.attn, given scores that are -infinity in whole rows: tokens 0 to 3 of 16."),
        ({"tokens": (3,), "affected": 1}, "whole rows: token 3 of 16."),
        ({"tokens": (0, 2), "affected": 2}, "whole rows: at 2 of 16 tokens, token 0 the first."),
        ({"tokens": tuple(range(8)), "affected": 12}, "whole rows: at 12 of 16 tokens, token 0 the first."),
        ({"tokens": tuple(range(8)), "affected": 16}, "whole rows: at all 16 tokens."),
        ({"tokens": (), "affected": None, "positions": None}, "whole rows."),
        ({"module": None, "function": "log", "value": "infinity"}, "The first infinity of the pass is made by log, given"),
    ],
)
def test_the_message_names_operation_place_and_tokens(changes, text):
    assert text in message(run_of(broken(), origins=(origin(**changes),)), "PC209")


def test_each_seed_has_its_own_origin():
    records = [*additive(8, seed=0), *broken(seed=1)]
    both = (origin(seed=0, function="exp"), origin(seed=1, function="div"))
    text = message(run_of(records, seeds=(0, 1), origins=both), "PC209")
    assert "made by div in" in text
    assert "exp" not in text


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"block": 3, "module": "blocks.3.mlp.act"}, (7, 3, "mlp", "blocks.3.mlp")),  # the block of the first sum that shows it
        ({"block": 1, "module": "blocks.1.attention.core"}, (2, 1, "attention", "blocks.1.attention")),
        ({"block": 1, "module": "blocks.1.mask"}, (None, 1, None, "blocks.1.mask")),
        ({"block": None, "module": "rotary"}, (7, 3, "mlp", "blocks.3.mlp")),
    ],
)
def test_the_place_is_where_it_was_made_if_that_lies_in_an_earlier_block(changes, place):
    """Its first tokens may be padding, which is not measured."""
    (finding,) = (one for one in judge(run_of(broken(), origins=(origin(**changes),))) if one.rule == "PC209")
    where = finding.site
    assert (where.site, where.block, where.sublayer, where.module) == place
    assert "The sum at site 7 (mlp of block 3) holds 40 NaN" in finding.message
    assert ("finite at every token that counts." in finding.message) == (place[1] == 1)


def test_nothing_is_said_where_no_operation_is_known():
    assert "first" not in message(run_of(broken()), "PC209")


def test_a_gradient_s_own_origin_is_named_where_the_loss_is_finite_and_the_loss_s_where_not():
    records = [with_gradient(r, math.nan, math.nan) if r.site < 6 else r for r in additive(8)]
    both = (origin(function="log", module=None, block=None), origin(direction="backward", function="the backward of sqrt"))
    assert "made by the backward of sqrt in layers.0.attn" in message(run_of(records, origins=both), "PC305")
    text = message(run_of(records, origins=both, loss=math.nan), "PC305")
    assert "the loss itself is NaN, although every sum is finite. The first NaN of the pass is made by log, given" in text


def test_a_loss_that_only_padding_spoils_is_not_said_to_be_spoilt_behind_the_blocks():
    records = [with_gradient(r, math.nan, math.nan) for r in additive(8)]
    text = message(run_of(records, origins=(origin(),), loss=math.nan), "PC305")
    assert "although every sum is finite at every token that counts. The first NaN" in text
    assert "after the last block" not in text
    assert "after the last block" in message(run_of(records, loss=math.nan), "PC305")


def test_a_parameter_s_gradient_has_it_too():
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.inf)
    one = origin(direction="backward", function="the backward of sqrt")
    assert "made by the backward of sqrt" in message(run_of(additive(4), [bad], origins=(one,)), "PC305")
