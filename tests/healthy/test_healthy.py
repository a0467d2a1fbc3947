"""Stock configs at their real depth: no error, and no finding that the table does not give a reason for."""

import functools
import math
import runpy
from pathlib import Path
from statistics import median

import pytest
from expected import EXPECTED, NOT_AS_TRAINED, REASONS
from stock import scan, stocks

STOCKS = stocks()
HEALTHY = [name for name in STOCKS if name not in NOT_AS_TRAINED]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
    return functools.cache(lambda name: scan(STOCKS[name], tmp_path_factory.mktemp("stock")))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_stock_config_has_no_error_and_only_the_findings_of_the_table(name, scanned):
    run = scanned(name)
    assert not [finding.message for finding in run.findings if finding.severity == "error"]
    expected = EXPECTED.get(name, {})
    assert {finding.rule for finding in run.findings} == expected.keys(), [finding.message for finding in run.findings]
    for finding in run.findings:
        assert finding.value == pytest.approx(expected[finding.rule][0], rel=0.15), finding.message
    # The whole depth was seen, and nothing of it was lost.
    assert run.model.sites >= STOCKS[name].full.num_hidden_layers
    assert all(math.isfinite(row.sum_rms) and row.nonfinite == 0 for row in run.sites)


def test_the_table_has_thirty_families_and_a_reason_for_every_finding():
    assert len({STOCKS[name].kind for name in HEALTHY}) >= 30
    assert EXPECTED.keys() <= set(HEALTHY)
    kinds = {(rule, kind) for findings in EXPECTED.values() for rule, (_, kind) in findings.items()}
    assert {kind for _, kind in kinds} == REASONS.keys()
    assert len(kinds) == len(REASONS)


def test_the_page_is_fresh():
    assert (DOCS / "healthy.md").read_text(encoding="utf-8") == runpy.run_path(str(DOCS / "healthy.py"))["page"]()


def deepnorm(model):
    """Xavier, and values, outputs and experts times (8N)^-1/4: the init that DeepNorm's alpha = (2N)^1/4 was derived for."""
    beta = (8 * model.config.num_hidden_layers) ** -0.25
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            scaled = any(part in name for part in ("v_proj", "o_proj", "out_proj", "experts"))
            weight.data.normal_(0, math.sqrt(2 / sum(weight.shape[-2:])) * (beta if scaled else 1))


@pytest.mark.parametrize("name", NOT_AS_TRAINED)
def test_a_config_that_transformers_draws_otherwise_than_it_was_trained_has_its_error(name, tmp_path):
    rule, value, _ = NOT_AS_TRAINED[name]
    errors = [finding for finding in scan(STOCKS[name], tmp_path).findings if finding.severity == "error"]
    assert [finding.rule for finding in errors] == [rule]
    assert errors[0].value == pytest.approx(value, rel=0.1)
    assert not [finding for finding in scan(STOCKS[name], tmp_path, deepnorm).findings if finding.severity == "error"]


def test_a_reduced_width_gives_the_numbers_of_the_full_model(scanned):
    # Measured at full size, 64 layers of 5120, with 128 to 256 tokens: the stream behind a number of blocks, and the updates.
    rows = scanned("Qwen3.8 27B").sites
    stream = {blocks: rows[2 * blocks - 1].sum_rms for blocks in (1, 2, 8, 16, 32, 64)}
    assert stream == pytest.approx({1: 3.42, 2: 4.84, 8: 9.70, 16: 13.72, 32: 19.42, 64: 27.44}, rel=0.03)
    for sublayer, update in {"mlp": 3.42, "attention": 0.35, "linear_attention": 0.185}.items():
        assert median(row.update_rms for row in rows if row.sublayer == sublayer) == pytest.approx(update, rel=0.1)
