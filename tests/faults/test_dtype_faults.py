"""What a dtype has no room for: squares, positions, and a stream that becomes wider by itself."""

from __future__ import annotations

import math

import pytest
import torch
from faulty_dtypes import HALF, HalfNorm, Rotary, ScaledBlock, ScaledInHalf, SingleRotary, in_bf16, large, rotating
from scanned import errors, found, norm, parameter, scan, sites
from toy import (
    VOCABULARY,
    Attention,
    Block,
    RMSNorm,
    only,
)

# ------------------------------------------------------------------ squares that fp16 has no room for


class HandNorm(RMSNorm):
    """The same in other words."""

    def forward(self, x):
        return self.weight * (x / (x * x).mean(dim=-1).add(self.eps).sqrt()[..., None])


@pytest.mark.parametrize("norm_class", [HalfNorm, HandNorm])
def test_a_norm_whose_squares_overflow_is_found_though_everything_is_finite(norm_class):
    """pytorch/pytorch issue 133085: an input of std 300 comes out as exactly 0."""
    run = scan(lambda: large(only(5, lambda: Block(norm=norm_class))), **HALF)
    for name in ("attn_norm", "mlp_norm"):
        row = norm(run, f"layers.5.{name}")
        assert row.input_rms == pytest.approx(300, rel=0.05)
        assert (row.output_rms, row.zero_share) == (0.0, 1.0)
        assert norm(run, f"layers.4.{name}").output_rms == pytest.approx(1.0, rel=0.01)
    assert not any(one.nonfinite for one in sites(run))
    assert math.isfinite(run.loss.value)
    ranges = [one for one in found(run, "PC212") if one.severity == "error"]
    assert ranges
    assert {one.site.block for one in ranges} == {5}


def test_it_is_found_in_every_block_too():
    run = scan(lambda: large(lambda _: Block(norm=HalfNorm), norm=HalfNorm), **HALF)
    ranges = [one for one in found(run, "PC212") if one.severity == "error"]
    assert ranges
    assert run.loss.value == pytest.approx(math.log(VOCABULARY), rel=1e-3)  # logits of 0: the loss looks sound


def test_a_norm_that_computes_in_single_precision_is_silent():
    run = scan(lambda: large(Block), **HALF)
    assert norm(run, "layers.5.attn_norm").output_rms == pytest.approx(1.0, rel=0.01)
    assert norm(run, "layers.5.attn_norm").zero_share == 0.0
    assert not found(run, "PC212")
    assert not errors(run)


# ------------------------------------------------------------------ tables in half precision


class RotaryOnTheWay(Rotary):
    """The tables are made in the forward pass, of frequencies in half precision."""

    def __init__(self):
        Attention.__init__(self, heads=2)

    def turned(self, x):
        cos, sin = self.tables(positions=x.shape[2])
        first, second = x.chunk(2, -1)
        return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class SingleRotaryOnTheWay(RotaryOnTheWay):
    made_in = torch.float32


def test_rotary_tables_made_in_half_precision_are_named():
    """EleutherAI/gpt-neox issue 1003: positions above 256 are not all numbers of bf16."""
    run = scan(lambda: rotating(Rotary), precision="bf16")
    for name in ("cos", "sin"):
        assert parameter(run, f"layers.0.attn.{name}").fp64_error == pytest.approx(2.0, abs=0.1)
    findings = found(run, "PC211")
    assert findings
    assert all(one.site.parameter.endswith(("cos", "sin")) for one in findings)


def test_so_are_those_that_are_made_on_the_way():
    """Half precision counts to 256 in steps of 1, and from there in steps of 2."""
    run = scan(lambda: rotating(RotaryOnTheWay), precision="bf16", tokens=512)
    (finding,) = found(run, "PC211")
    assert finding.site.block == 0
    assert finding.site.module.startswith("layers.0.attn")
    assert not found(scan(lambda: rotating(SingleRotaryOnTheWay), precision="bf16", tokens=512), "PC211")


def test_tables_made_in_single_precision_and_rounded_are_silent():
    run = scan(lambda: rotating(SingleRotary), precision="bf16")
    assert parameter(run, "layers.0.attn.cos").fp64_error == pytest.approx(0.0, abs=1e-3)
    assert not found(run, "PC211")
    assert not errors(run)


# ------------------------------------------------------------------ a stream that becomes wider by itself


class ScaledUpdate(ScaledBlock):
    """The same on the update."""

    def forward(self, x):
        x = x + self.resid_lambda * self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


@pytest.mark.parametrize("block", [ScaledBlock, ScaledUpdate])
def test_an_fp32_scale_that_promotes_the_stream_is_found_at_the_first_site(block):
    """trevin-creator/autoresearch-mlx issue 3: everything after the first block was in fp32."""
    run = scan(lambda: in_bf16(block))
    assert sites(run)[2].stream_dtype == "float32"
    assert parameter(run, "layers.0.attn.wq.weight").dtype == "bfloat16"
    (finding,) = found(run, "PC211")
    assert (finding.site.site, finding.site.block) == (0, 0)


def test_the_same_scale_in_the_dtype_of_the_stream_is_silent():
    run = scan(lambda: in_bf16(ScaledInHalf))
    assert {one.stream_dtype for one in sites(run)} == {"bfloat16"}
    assert not found(run, "PC211")
    assert not errors(run)
