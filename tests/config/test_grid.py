"""The values that are varied: how they are read, and that every combination has a name of its own."""

from __future__ import annotations

import re

import pytest

from propcheck.config.grid import grid, read_axes
from propcheck.errors import PropcheckError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("residual.placement=pre,post", ["pre", "post"]),
        ("model.layers=16, 32", [16, 32]),
        ("init.std=0.02,1e-3", [0.02, 0.001]),
        ("scan.seeds=[0,1],[2]", [[0, 1], [2]]),
        ('model.mixers=["attention"],["deltanet", "attention"]', [["attention"], ["deltanet", "attention"]]),
        ('python.args.text="a,b","say \\"x,y\\"",\'c,d\'', ["a,b", 'say "x,y"', "c,d"]),
        ("python.args.text=it's,that's", ["it's", "that's"]),
        ("model.attention={ heads = 2, kv_heads = 1 },{ heads = 4 }", [{"heads": 2, "kv_heads": 1}, {"heads": 4}]),
        ("model.tied_head=true,false", [True, False]),
    ],
)
def test_values_are_split_at_the_commas_outside_brackets_and_quotes(text, values):
    (axis,) = read_axes([text])
    assert [override.value for override in axis.values] == values
    assert axis.key == text.partition("=")[0]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["model.layers"], "--vary model.layers: must be key=value,value"),
        (["model.layers="], "the value after = is missing"),
        (["model.layers=1,,2"], "the value after = is missing"),
        (["model.layers=[1,2"], "not a TOML value"),
        (["model.layers=1,2,1"], "model.layers is given this value twice"),
        (["model.layers=1", "model.layers=2"], "model.layers is already varied"),
        (["base=tiny,gpt2"], "base has no effect on a scan"),
    ],
)
def test_what_cannot_be_varied_is_refused(texts, message):
    with pytest.raises(PropcheckError, match=re.escape(message)):
        read_axes(texts)


def test_the_first_key_varies_slowest_and_a_cell_is_named_after_its_values():
    cells = grid(read_axes(["residual.placement=pre,post", "model.layers=16,32"]))
    assert [cell.name for cell in cells] == [
        "placement=pre,layers=16",
        "placement=pre,layers=32",
        "placement=post,layers=16",
        "placement=post,layers=32",
    ]
    assert [override.value for override in cells[2].overrides] == ["post", 16]


def test_keys_that_end_alike_are_told_apart_by_as_many_parts_as_that_takes():
    axes = read_axes(["model.width=64", "model.ffn.width=96", "residual.scale=plain"])
    assert [axis.short for axis in axes] == ["model.width", "ffn.width", "scale"]


def test_no_two_cells_share_a_directory_and_no_name_is_unsafe():
    values = [
        "'a/b'",
        "a-b",
        "A-b",
        "a b",
        "..",
        "'1'",
        "1",
        "-1",
        "[1]",
        "[-1]",
        "x" * 300,
        "x" * 299,
        "1.0",
        "true",
        "'true'",
    ]
    cells = grid(read_axes([f"python.args.one={','.join(values)}", "python.args.two=a-b,'a,two=b'"]))
    names = [cell.name for cell in cells]
    assert len({name.casefold() for name in names}) == len(cells) == 2 * len(values)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*", name), name
        assert len(name) < 250
    (long,) = grid(read_axes([f"python.args.{'k' * 40}{i}={'v' * 40}" for i in range(9)]))
    assert len(long.name) < 250


def test_the_name_of_a_cell_does_not_depend_on_the_other_cells():
    (alone,) = grid(read_axes(['model.mixers=["attention"]']))
    both = grid(read_axes(['model.mixers=["deltanet"],["attention"]']))
    assert both[1].name == alone.name
