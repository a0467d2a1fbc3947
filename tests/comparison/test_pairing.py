"""Which sites and parameters of two runs are the same, on records that no model stands behind."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic import parameter, site

from propcheck.comparison.match_parameters import count_redrawn, match_parameters
from propcheck.comparison.match_sites import SitePair, match_sites

HYBRID = ("linear_attention", "linear_attention", "linear_attention", "attention")


def model(blocks, kinds=("attention", "mlp"), *, first=0, named="blocks"):
    """The sites of a model; ``blocks`` are their numbers, or how many there are."""
    rows = []
    for block in range(blocks) if isinstance(blocks, int) else blocks:
        for kind in kinds(block) if callable(kinds) else kinds:
            one = site(first + len(rows), block, kind)
            rows.append(dataclasses.replace(one, module=f"{named}.{block}.{kind}"))
    return rows


def hybrid(block):
    return (HYBRID[block % 4], "mlp")


def beside(pairing):
    """Give the numbers of the sites that belong together."""
    return [(pair.base and pair.base.site, pair.other and pair.other.site) for pair in pairing.pairs]


def of_blocks(pairing):
    """Give which block is beside which, None where a side lacks it."""
    return list(dict.fromkeys((pair.base and pair.base.block, pair.other and pair.other.block) for pair in pairing.pairs))


# ------------------------------------------------------------------ sites


@pytest.mark.parametrize("by_number", [False, True])
def test_models_of_one_depth_belong_together_whatever_their_modules_are_called(by_number):
    found = match_sites(model(4), model(4, named="h"), by_number=by_number)
    assert beside(found) == [(n, n) for n in range(8)]
    assert (found.relative, found.notes) == (False, ())


@pytest.mark.parametrize("by_number", [False, True])
def test_a_missing_sublayer_is_missing_in_its_block_alone(by_number):
    lacking = model(6, lambda block: ("mlp",) if block == 3 else ("attention", "mlp"))
    found = match_sites(model(6), lacking, by_number=by_number, names=("the baseline", "this run"))
    assert beside(found) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 5),
        (6, None),
        (7, 6),
        (8, 7),
        (9, 8),
        (10, 9),
        (11, 10),
    ]
    assert found.notes == ("This run lacks the attention of block 3 of the baseline (site 6).",)


@pytest.mark.parametrize("by_number", [False, True])
def test_the_paths_of_modules_tell_which_blocks_were_left_out_of_the_middle(by_number):
    """Blocks are counted as they run, so that only the paths keep the numbers 5 and 6 free."""
    rest = [dataclasses.replace(one, block=one.block if one.block < 5 else one.block - 2) for one in model((0, 1, 2, 3, 4, 7))]
    found = match_sites(model(8), rest, by_number=by_number)
    assert of_blocks(found) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, None), (6, None), (7, 5)]
    assert (found.relative, found.notes) == (False, ("B lacks blocks 5 to 6 of A.",))
    # Either way round; and a model that is merely shallower has left out nothing.
    assert match_sites(rest, model(8), by_number=by_number).notes == ("A lacks blocks 5 to 6 of B.",)
    assert match_sites(model(8), model(6)).relative


def test_a_new_sublayer_stands_where_it_is_in_the_forward_pass():
    more = model(4, lambda block: ("attention", "moe", "mlp") if block == 2 else ("attention", "mlp"))
    found = match_sites(model(4), more)
    assert beside(found) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (None, 5), (5, 6), (6, 7), (7, 8)]
    assert found.notes == ("A lacks the moe of block 2 of B (site 5).",)


@pytest.mark.parametrize("by_number", [False, True])
def test_a_block_that_was_left_out_leaves_its_number_free(by_number):
    found = match_sites(model(8), model([0, 1, 2, 4, 5, 6, 7]), by_number=by_number)
    assert of_blocks(found) == [(0, 0), (1, 1), (2, 2), (3, None), *((n, n) for n in range(4, 8))]
    assert (found.relative, found.notes) == (False, ("B lacks block 3 of A.",))


def test_a_gate_matches_blocks_by_their_numbers_and_what_is_beyond_is_new():
    found = match_sites(model(4), model(6), by_number=True)
    assert of_blocks(found) == [(0, 0), (1, 1), (2, 2), (3, 3), (None, 4), (None, 5)]
    assert found.notes == ("A lacks blocks 4 to 5 of B.",)


def test_models_of_other_depth_are_compared_at_the_same_relative_depth():
    """Block i of 4 lies at i/3, block j of 10 at j/9: 0, 3, 6, 9."""
    found = match_sites(model(4), model(10))
    assert found.relative
    assert of_blocks(found) == [(0, 0), (1, 3), (2, 6), (3, 9)]
    assert found.notes == ("A has 4 blocks and B has 10: compared at equal relative depth.",)
    assert of_blocks(match_sites(model(10), model(4))) == [(0, 0), (3, 1), (6, 2), (9, 3)]


def test_models_of_a_pattern_are_compared_with_blocks_of_like_kinds():
    """Attention in blocks 3 and 7 of 8, and in 3, 7 .. 23 of 24: 3/7 lies nearest to 11/23 (.478), not to 7/23 (.304)."""
    found = match_sites(model(8, hybrid), model(24, hybrid))
    assert found.relative
    beside_it = dict(of_blocks(found))
    assert (beside_it[3], beside_it[7]) == (11, 23)
    assert all(pair.base.sublayer == pair.other.sublayer for pair in found.pairs)


def test_a_layer_that_was_taken_out_of_a_pattern_is_found_by_what_follows_it():
    """Numbered without a gap: block 3 of every four is attention, and block 3 is gone."""
    kinds = [hybrid(block) for block in range(16) if block != 3]
    found = match_sites(model(16, hybrid), model(15, lambda block: kinds[block]))
    assert not found.relative
    assert (3, None) in of_blocks(found)
    assert [pair for pair in of_blocks(found) if None not in pair] == [(n, n if n < 3 else n - 1) for n in range(16) if n != 3]
    back = match_sites(model(15, lambda block: kinds[block]), model(16, hybrid))
    assert (None, 3) in of_blocks(back)


def test_a_layer_taken_out_of_blocks_that_are_all_alike_cannot_be_told():
    assert match_sites(model(16), model(15)).relative


def test_updates_of_a_parallel_block_keep_their_kinds():
    found = match_sites(model(3, ("attention", "mlp")), model(3, ("mlp", "attention")))
    assert [(pair.base.sublayer, pair.other.sublayer) for pair in found.pairs] == [
        ("attention", "attention"),
        ("mlp", "mlp"),
    ] * 3


def test_kinds_that_are_told_otherwise_are_matched_in_their_order():
    """A mixer that one run calls ssm is the other's linear attention."""
    found = match_sites(model(3, ("ssm", "mlp")), model(3, ("linear_attention", "mlp")))
    assert beside(found) == [(n, n) for n in range(6)]
    assert found.notes == ()


def test_where_the_blocks_of_one_side_were_not_told_sites_are_matched_by_kind():
    flat = [site(n, None, ("attention", "mlp")[n % 2]) for n in range(8)]
    assert beside(match_sites(model(4), flat)) == [(n, n) for n in range(8)]
    assert beside(match_sites(model(4), [site(n, None, "other") for n in range(8)])) == [(n, n) for n in range(8)]


def test_sites_outside_of_the_blocks_are_matched_in_their_order():
    """A stem before the blocks and a head behind them, neither of which is in one."""

    def framed(blocks):
        inner = model(blocks, first=1)
        return [site(0, None, "other"), *inner, site(len(inner) + 1, None, "other")]

    assert beside(match_sites(framed(3), framed(3), by_number=True)) == [(n, n) for n in range(8)]


@pytest.mark.parametrize("by_number", [False, True])
def test_every_site_of_both_sides_is_in_a_pair_once(by_number):
    shapes = [model(6), model(5), model([0, 2, 5]), model(8, hybrid), model(6, ("mlp",)), [site(0, None, "other")], []]
    for base in shapes:
        for other in shapes:
            found = match_sites(base, other, by_number=by_number)
            if found.relative:  # a block of the deeper one may lie beside several
                continue
            for side, rows in (("base", base), ("other", other)):
                there = [one.site for pair in found.pairs if (one := getattr(pair, side)) is not None]
                assert sorted(there) == [one.site for one in rows]


# ------------------------------------------------------------------ parameters

SITES = tuple(SitePair(one, one) for one in model(2))


def of(name, number, shape=(4, 4), **changes):
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    place = {"site": number, "block": None if number is None else number // 2}
    return parameter(name, shape=shape, numel=rows * columns, **place, **changes)


def names(records):
    return [one.name for one in records]


def together(found):
    return {(pair.base.name, pair.other.name): pair.same_name for pair in found.pairs}


def test_parameters_of_one_name_belong_together():
    found = match_parameters([of("a", 0), of("b", 1)], [of("b", 1), of("a", 0)], SITES)
    assert together(found) == {("a", "a"): True, ("b", "b"): True}
    assert (found.regrouped, found.missing, found.new) == ((), (), ())


def test_tied_parameters_have_any_of_their_names():
    found = match_parameters([of("embed = head", None)], [of("head = embed", None)], SITES)
    assert together(found) == {("embed = head", "head = embed"): True}
    untied = match_parameters([of("embed = head", None)], [of("embed", None), of("head", None)], SITES)
    assert together(untied) == {("embed = head", "embed"): True}
    assert names(untied.new) == ["head"]


def test_a_renamed_parameter_is_the_one_of_its_role_and_shape_in_its_branch():
    base = [of("wo", 0), of("up", 1, (4, 16)), of("down", 1, (16, 4))]
    other = [of("o_proj", 0), of("fc1", 1, (4, 16)), of("fc2", 1, (16, 4))]
    found = match_parameters(base, other, SITES)
    assert together(found) == {("wo", "o_proj"): False, ("up", "fc1"): False, ("down", "fc2"): False}


def test_one_that_moved_into_another_branch_is_missing_in_one_and_new_in_the_other():
    found = match_parameters([of("wo", 0)], [of("o_proj", 1)], SITES)
    assert (names(found.missing), names(found.new)) == (["wo"], ["o_proj"])


def test_matrices_that_were_fused_are_in_both():
    separate = [of("q", 0, (4, 4)), of("k", 0, (2, 4)), of("v", 0, (2, 4)), of("o", 0, (4, 4))]
    found = match_parameters(separate, [of("qkv", 0, (8, 4)), of("o", 0, (4, 4))], SITES)
    assert together(found) == {("o", "o"): True}
    assert names(found.regrouped) == ["q", "k", "v"]
    assert (found.missing, found.new) == ((), ())
    back = match_parameters([of("qkv", 0, (8, 4))], separate[:3], SITES)
    assert (names(back.regrouped), back.missing, back.new) == (["qkv"], (), ())


def test_several_of_one_shape_under_other_names_are_in_both_too():
    found = match_parameters([of("wq", 0), of("wk", 0), of("wv", 0)], [of("q", 0), of("k", 0), of("v", 0)], SITES)
    assert names(found.regrouped) == ["wq", "wk", "wv"]


def test_a_fused_matrix_of_another_size_is_not():
    found = match_parameters([of("q", 0), of("k", 0)], [of("qkv", 0, (12, 4))], SITES)
    assert (names(found.missing), names(found.new)) == (["q", "k"], ["qkv"])


def test_one_of_another_shape_is_missing_and_new():
    found = match_parameters([of("head", None, (4, 100))], [of("head", None, (4, 200))], SITES)
    assert (names(found.missing), names(found.new)) == (["head"], ["head"])


def test_a_frozen_one_is_not_the_same_as_a_trained_one_of_another_name():
    found = match_parameters([of("a", 0)], [of("b", 0, requires_grad=False)], SITES)
    assert (names(found.missing), names(found.new)) == (["a"], ["b"])


def test_buffers_are_no_parameters():
    found = match_parameters([of("a", 0)], [of("a", 0), of("mask", 0, kind="buffer")], SITES)
    assert (found.missing, found.new) == ((), ())


# ------------------------------------------------------------------ other draws


@pytest.mark.parametrize(
    ("other", "amount"),
    [
        (of("a", 0, std=0.02, absmax=0.08), 0),
        (of("a", 0, std=0.04, absmax=0.16), 0),  # the same draw, twice as large
        (of("a", 0, std=0.02, absmax=0.0801), 0),  # rounded to bf16
        (of("a", 0, std=0.02, absmax=0.09), 1),
        (of("a", 0, std=0.0, absmax=1.0), 0),  # constant
        (of("a", 0, std=float("nan"), absmax=float("inf")), 0),
        (of("a", 0, std=None, absmax=None), 0),
        (of("b", 0, std=0.02, absmax=0.08), 1),  # of another name
    ],
)
def test_a_weight_is_another_draw_if_no_factor_explains_it(other, amount):
    found = match_parameters([of("a", 0, std=0.02, absmax=0.08)], [other], SITES)
    assert count_redrawn(found) == (amount, 1)


def test_constants_under_other_names_are_no_draws():
    found = match_parameters([of("gain", 0, std=0.0)], [of("weight", 0, std=0.0)], SITES)
    assert count_redrawn(found) == (0, 0)
