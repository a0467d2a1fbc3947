"""Models of x-transformers, whose options write and read the stream in many ways: how many sites, and what is measured."""

import math

import pytest
from once import scanned_once
from x_transformers_models import CANNOT_BF16, X_TRANSFORMERS

import propcheck

RUNS = [
    (name, precision)
    for name in X_TRANSFORMERS
    for precision in ("fp32", "bf16")
    if precision == "fp32" or name not in CANNOT_BF16
]
PAIR = ["attention", "mlp"]
ENCODER_DECODER = PAIR * 3 + ["attention", "attention", "mlp"] * 3
KINDS = {
    **dict.fromkeys(("pre-norm", "post-norm", "sandwich norm", "rmsnorm and swiglu", "alibi", "rotary"), PAIR * 3),
    **dict.fromkeys(("relative positions of T5", "talking heads", "value residual", "hyper-connections", "images"), PAIR * 3),
    **dict.fromkeys(("adaptive norm", "tied layers", "layerscale", "gated values", "memory tokens"), PAIR * 3),
    "macaron": ["mlp", *PAIR] * 3,
    "attention alone": ["attention"] * 3,
    "sandwich of layers": ["attention", *PAIR * 2, "mlp"],
    "encoder and decoder": ENCODER_DECODER,
    "encoder and decoder, post-norm": ENCODER_DECODER,
}
PLACEMENTS = {
    "pre-norm": "pre",
    "post-norm": "post",
    "sandwich norm": "sandwich",
    "pre- and post-norm": "pre+post",
    "images": "pre",
    "tied layers": "pre",
}


@pytest.fixture(scope="module")
def scans():
    return scanned_once(_target)


def _target(name):
    made = X_TRANSFORMERS[name]
    return propcheck.Target(made.build(), batch=made.batch(), loss=made.loss)


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_every_residual_addition_is_found_in_order(name, precision, scans):
    rows = scans(name, precision).record.sites
    assert len(rows) == X_TRANSFORMERS[name].sites
    assert [row.site for row in rows] == list(range(len(rows)))
    assert all(row.module is not None and row.placement is not None for row in rows)


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_what_is_measured_at_a_site_is_finite_and_not_zero(name, precision, scans):
    run = scans(name, precision)
    assert math.isfinite(run.loss.value)
    columns = (
        "stream_rms",
        "update_rms",
        "sum_rms",
        "grad_stream_norm",
        "grad_update_norm",
        "grad_sum_norm",
        "param_grad_norm",
    )
    for row in run.record.sites:
        for column in columns:
            assert 0 < getattr(row, column) < math.inf, (row.site, column)


@pytest.mark.parametrize("name", X_TRANSFORMERS)
def test_a_site_knows_its_block(name, scans):
    """Every sublayer is a member of one list: a block."""
    rows = scans(name, "fp32").record.sites
    for row in rows:
        assert row.block is not None, row.site
    if not name.startswith("encoder and decoder"):
        assert all(row.module.startswith(f"attn_layers.layers.{row.block}.") for row in rows)
    else:
        assert [row.block for row in rows] == list(range(15))


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_of_sublayers(name, scans):
    assert [row.sublayer for row in scans(name, "fp32").record.sites] == KINDS[name]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_placement_of_the_norms(name, scans):
    assert {row.placement for row in scans(name, "fp32").record.sites} == {PLACEMENTS[name]}


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_nothing_goes_unobserved(name, precision, scans):
    found = {finding.rule for finding in scans(name, precision).findings} & {"PC101", "PC102", "PC502", "PC503"}
    assert found == ({"PC502"} if X_TRANSFORMERS[name].sites == 0 else set())
