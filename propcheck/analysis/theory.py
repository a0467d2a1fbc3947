"""What an architecture predicts for its own stream and gradients.

Symbols, all squares: S is the mean square of the stream, f that of what a branch adds when it reads RMS 1, b the same of the
gradient that it sends back; g is the norm of the gradient. Updates are taken as uncorrelated with the stream.

    forward     S_sum = S_in + f               through an addition
                S_in = gain^2                  behind a norm on the stream (post, deepnorm); S_sum where there is none
    backward    g_in^2 = g_out^2 (1 + b/S_in)  through an addition
                g_in^2 = g_out^2 gain^2/S_sum  through a norm on the stream

A branch that reads the stream as it is (post, deepnorm) adds f S_in in place of f, and b S_in in place of b.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.branch_gain import BARE, chain_of, typical
from propcheck.analysis.profile import NORM_ON_STREAM, streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.branch_gain import Addition
    from propcheck.records import Run, SiteRecord

# b / f at initialisation. A gated product (SwiGLU) has two paths of equal weight: 2.01 to 2.07 computed for pre-activations of
# std 0.2 to 2; ReLU and GELU have 1.00 to 1.07. Measured site by site at the initialisation of transformers' Llama, GPT-2 and
# Qwen3.5 (width 256, 12 to 16 blocks, the first left out): gated mlp 1.6 to 2.8, around 2.1; GELU mlp 1.0 to 1.2; attention up
# to 2.5; Gated DeltaNet 2.9 to 5.6 (its update is a product of values, write strength and output gate).
GAIN_RATIO = {"mlp": 2.07, "moe": 2.07, "attention": 3.0, "linear_attention": 5.0, "ssm": 5.0, "other": 3.0}


@dataclass(frozen=True, slots=True)
class _Level:
    """Predicted S at an addition and of its sum; ``told`` unless its own update had to be taken for it."""

    stream: float
    total: float
    told: bool


def predict(run: Run) -> tuple[SiteRecord, ...]:
    """Fill ``theory_sum_rms`` and ``theory_grad_norm``.

    Parameters
    ----------
    run
        With every row of every seed.

    Returns
    -------
    tuple of SiteRecord
        The run's sites in their order. ``None`` stands where no prediction applies: an unknown placement, values that were not
        observed, the only addition of its kind, attention that reads an embedding, branches without a norm.

    Notes
    -----
    Forward it starts from the measured RMS where a stream begins, backward from the measured gradient of its last sum. f and b
    are trimmed means over the additions of one kind (placement, sublayer, place in the block), scaled where the initial values
    of the residual projections differ by depth, or by the gains of the norms that write the updates; of sublayers that mix
    tokens, over the nearest quarter of them. So the curves are laws of the depth, and no copies of what one site does. They
    follow from arXiv 2002.04745 (Lemma 2), the gradient of a norm from arXiv 2403.09635; as that holds for tokens of one size,
    what a norm on the stream was measured to pass is averaged likewise and counts.
    Not in them: updates that are correlated with the stream. Where all tokens have become alike, one vector decides each step,
    and what is left of it by chance falls with the root of the width alone.
    """
    theory: dict[tuple[int, int], tuple[float | None, float | None]] = {}
    for seed in sorted({record.seed for record in run.sites}):
        for stream in streams(run, seed):
            chain = chain_of(run, stream, seed)
            levels = _forward(chain)
            for one, level, gradient in zip(chain, levels, _backward(chain, levels), strict=True):
                rms = level.total**0.5 if level is not None and level.told else None
                theory |= {(seed, row.site): (rms, gradient) for row in one.rows}
    return tuple(
        dataclasses.replace(row, theory_sum_rms=theory[row.seed, row.site][0], theory_grad_norm=theory[row.seed, row.site][1])
        for row in run.sites
    )


def _lone(one: Addition, before: Addition | None) -> bool:
    """Whether other additions say nothing of this one, so that its own values stand in the law and none is predicted.

    Without a norm anywhere the size of an update may go as any power of the stream's. Where a stream begins, so does what is
    read without a norm; and attention passes on what tokens have in common, of which those of an embedding have least: its
    first update was measured 5 to 10 times smaller (mean square) than the same attention's deeper in the model.
    """
    placement = one.rows[0].placement
    begins = before is None and (placement in BARE or any(row.sublayer == "attention" for row in one.rows))
    return begins or placement is None or placement == "none"


def _forward(chain: Sequence[Addition]) -> list[_Level | None]:
    measured = [one.added() for one in chain]
    found: list[_Level | None] = []
    before: Addition | None = None
    stream: float | None = None
    for one, own, usual in zip(chain, measured, typical(chain, measured), strict=True):
        if before is None or before.width != one.width:
            stream = one.stream
        elif before.behind is not None:
            stream = one.factor * before.behind
        told = usual is not None and not _lone(one, before)
        gain = usual if told else own
        level = None if stream is None or gain is None else _Level(stream, stream + gain * one.unit(stream), told)
        found.append(level)
        before, stream = one, level.total if level is not None else None
    return found


def _backward(chain: Sequence[Addition], levels: Sequence[_Level | None]) -> list[float | None]:
    befores = [None, *chain[:-1]]
    measured = [one.sent_back(before) for one, before in zip(chain, befores, strict=True)]
    gains = typical(chain, measured)
    passed = typical(chain, [one.passed(after) for one, after in zip(chain, [*chain[1:], None], strict=True)])
    found: list[float | None] = []
    after: Addition | None = None  # the first one, in backward order, whose gradient was measured
    gradient: float | None = None  # of the sum, squared
    for i, one in reversed(list(enumerate(chain))):
        before, level, usual = befores[i], levels[i], gains[i]
        if after is None or after.width != one.width:
            gradient = one.gradient
        elif one.behind is not None and gradient is not None:
            through = passed[i]
            gradient *= one.behind * (1.0 if through is None else through)
            gradient = gradient / level.total if level is not None and level.total else None
        if gradient is not None:
            after = one
        told = usual is not None and not _lone(one, before)
        gain = usual if told else measured[i]
        entering = None
        if level is not None and level.stream and gain is not None and gradient is not None:
            entering = gradient * one.factor * max(0.0, 1 + gain * one.unit(level.stream) / level.stream)
        at = gradient if one.copied and entering is not None else entering
        found.append(at**0.5 if told and at is not None and math.isfinite(at) else None)
        gradient = entering
    return found[::-1]


def expected_gradient_step(sites: Sequence[SiteRecord], depth: int) -> float:
    """Predict the log factor by which a block scales the gradient on its way back.

    Where nothing normalises the stream itself (pre, sandwich, reordered, none), g_k^2 = g_{k+1}^2 (1 + b/S), and
    b/S = (b/f) * update_ratio^2. With updates of one size S grows in proportion to the depth l, so a block's step is at most
    (b/f)/2 * ln((l+1)/l): a 1/sqrt(l) law for b/f = 1, a 1/l law for SwiGLU. That bound caps the prediction: a forward pass
    that explodes does not excuse its gradients.

    Parameters
    ----------
    sites
        The sites of the block.
    depth
        Blocks before it, at least 1.

    Returns
    -------
    float
        Natural logarithm, 0 where a norm follows each addition.

    Notes
    -----
    Derived from uncorrelated updates in the wide limit; the post-norm form follows arXiv 2002.04745.
    """
    if any(site.placement in NORM_ON_STREAM for site in sites):
        return 0.0
    gains = [GAIN_RATIO[site.sublayer] for site in sites]
    additive = max(gains) / 2 * math.log((depth + 1) / depth)
    ratios = [site.update_ratio for site in sites if site.update_ratio is not None and math.isfinite(site.update_ratio)]
    if len(ratios) < len(sites):
        return additive
    return min(additive, sum(math.log(math.hypot(1, gain**0.5 * ratio)) for gain, ratio in zip(gains, ratios, strict=True)))
