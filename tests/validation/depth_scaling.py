"""DeepNorm, Peri-LN and Keel at 64 blocks, in the reference decoder, scanned."""

from __future__ import annotations

import math
from functools import cache

from published import Row

import propcheck
from propcheck.config.decoder import DecoderConfig
from propcheck.targets.decoder.model import Decoder

BLOCKS, SEEDS = 64, (0, 1)
SETTING = f"reference decoder, {BLOCKS} blocks of width 128, xavier, embedding normed, {len(SEEDS)} seeds"


def build(placement: str) -> Decoder:
    settings = {
        "model": {
            "layers": BLOCKS,
            "width": 128,
            "vocabulary": 1000,
            "attention": {"heads": 4},
            "ffn": {"width": 512, "kind": "relu"},
            "norm": {"kind": "layernorm"},
        },
        "residual": {"placement": placement, "embedding_norm": True},
        "init": {"scheme": "xavier"},
    }
    return Decoder(DecoderConfig.model_validate(settings))


@cache
def scanned(placement: str) -> propcheck.Run:
    return propcheck.scan(build, args={"placement": placement}, tokens=64, seeds=SEEDS, set={"inputs.source": "uniform"})


def mean_squares(placement: str) -> list[float]:
    """S of the sum at each site, the mean over the seeds."""
    return [float((group.sum_rms**2).mean()) for _, group in scanned(placement).sublayers.groupby("site")]


def keel_gradient() -> float:
    """The gradient of the stream before the second block over that before the last addition.

    The first block has no α, so a gradient there is that of another quantity.
    """
    mean = scanned("keel").sublayers.groupby("site").grad_stream_norm.mean()
    return float(mean[2] / mean[2 * BLOCKS - 1])


def deepnorm_row() -> Row:
    sums = mean_squares("deepnorm")
    return Row(
        "DeepNorm, min and max mean square of αx + F x",
        SETTING,
        f"α² = {math.sqrt(2 * BLOCKS):.3f}",
        "DeepNet, arXiv 2203.00555",
        (min(sums), max(sums)),
        "{:.2f}",
    )


def peri_ln_row() -> Row:
    return Row(
        "Peri-LN, mean square of the stream after the last block",
        SETTING,
        f"1 + 2 x {BLOCKS} = {1 + 2 * BLOCKS}",
        "arXiv 2502.02732, for unit gains and uncorrelated updates",
        (mean_squares("sandwich")[-1],),
        "{:.1f}",
    )


def keel_row() -> Row:
    return Row(
        "Keel, gradient of the stream before block 1 / before the last addition",
        SETTING,
        "tends to 1: Π α/√(α²+1), α = L",
        "arXiv 2601.19895",
        (keel_gradient(),),
        "{:.3f}",
    )


def rows() -> list[Row]:
    return [deepnorm_row(), peri_ln_row(), keel_row()]
