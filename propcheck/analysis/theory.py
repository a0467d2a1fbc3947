"""Theory: RMS of the stream and norm of its gradient as the architecture predicts them.

Symbols, all squares: S is the mean square of the stream, f the mean square that a branch adds when it reads RMS 1, b the
gradient that it sends back likewise; g is the norm of the gradient. Updates are assumed uncorrelated with the stream.

    forward     S_sum = S_in + f               through an addition
                S_in = gain^2                  behind a norm on the stream (post, deepnorm); S_sum where there is none
    backward    g_in^2 = g_out^2 (1 + b/S_in)  through an addition
                g_in^2 = g_out^2 gain^2/S_sum  through a norm on the stream

For a branch that reads the stream without a norm (post, deepnorm), f S_in replaces f, and b S_in replaces b.
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

    from propcheck.analysis.branch_gain import AdditionGain
    from propcheck.records import Run, SiteRecord

# b / f at initialisation. A gated product (SwiGLU) has two paths of equal weight: 2.01 to 2.07 computed for pre-activations of
# std 0.2 to 2; ReLU and GELU have 1.00 to 1.07. Measured per site at the initialisation of transformers' Llama, GPT-2 and
# Qwen3.5 (width 256, 12 to 16 blocks, without the first): gated mlp 1.6 to 2.8, around 2.1; GELU mlp 1.0 to 1.2; attention up
# to 2.5; Gated DeltaNet 2.9 to 5.6 (its update is a product of values, write strength and output gate).
GAIN_RATIO = {"mlp": 2.07, "moe": 2.07, "attention": 3.0, "linear_attention": 5.0, "ssm": 5.0, "other": 3.0}


@dataclass(frozen=True, slots=True)
class _Level:
    """Predicted S at an addition and of its sum; ``predicted`` is False if its own measured update had to be used."""

    stream: float
    total: float
    predicted: bool


def predict(run: Run) -> tuple[SiteRecord, ...]:
    """Fill ``theory_sum_rms`` and ``theory_grad_norm``.

    Parameters
    ----------
    run
        A run with all rows of all seeds.

    Returns
    -------
    tuple of SiteRecord
        The run's sites in their order. The predictions are None where none applies: unknown placement, unobserved values, the
        only addition of its kind, attention that reads an embedding, branches without a norm.

    Notes
    -----
    The forward prediction starts from the measured RMS where a stream begins, the backward one from the measured gradient of
    its last sum. f and b are trimmed means over the additions of one kind (placement, sublayer, place in the block). They are
    scaled where the initial values of the residual projections differ by depth, or by the gains of the norms that write the
    updates. For sublayers that mix tokens the mean is over the nearest quarter. So the curves are laws of the depth, not copies
    of single sites. They follow from arXiv 2002.04745 (Lemma 2); the gradient of a norm is from arXiv 2403.09635. As that holds
    for tokens of equal size, the measured share of the gradient that a norm on the stream passes is averaged in the same way
    and multiplied in.

    Updates correlated with the stream are not modelled. If all tokens have become alike, a single vector decides each step,
    and the random part of it falls only with the root of the width.
    """
    theory: dict[tuple[int, int], tuple[float | None, float | None]] = {}
    for seed in sorted({record.seed for record in run.sites}):
        for stream in streams(run, seed):
            chain = chain_of(run, stream, seed)
            levels = _forward(chain)
            for addition, level, gradient in zip(chain, levels, _backward(chain, levels), strict=True):
                rms = level.total**0.5 if level is not None and level.predicted else None
                theory |= {(seed, row.site): (rms, gradient) for row in addition.rows}
    return tuple(
        dataclasses.replace(row, theory_sum_rms=theory[row.seed, row.site][0], theory_grad_norm=theory[row.seed, row.site][1])
        for row in run.sites
    )


def _unpredictable(addition: AdditionGain, before: AdditionGain | None) -> bool:
    """Return whether other additions say nothing about this one, so that its own values are used and none is predicted.

    Without a norm anywhere the size of an update may follow any power of the stream's. Where a stream begins, so may that of a
    branch that reads it without a norm. Attention passes on what tokens have in common, which is least for those of an
    embedding: its first update was measured 5 to 10 times smaller (mean square) than the same attention's deeper in the model.
    """
    placement = addition.rows[0].placement
    begins = before is None and (placement in BARE or any(row.sublayer == "attention" for row in addition.rows))
    return begins or placement is None or placement == "none"


def _forward(chain: Sequence[AdditionGain]) -> list[_Level | None]:
    """Predict S along a stream."""
    measured = [addition.added() for addition in chain]
    levels: list[_Level | None] = []
    before: AdditionGain | None = None
    stream: float | None = None
    for addition, own_gain, typical_gain in zip(chain, measured, typical(chain, measured), strict=True):
        if before is None or before.width != addition.width:
            stream = addition.stream
        elif before.behind is not None:
            stream = addition.factor * before.behind
        predicted = typical_gain is not None and not _unpredictable(addition, before)
        gain = typical_gain if predicted else own_gain
        level = None
        if stream is not None and gain is not None:
            level = _Level(stream, stream + gain * addition.unit(stream), predicted)
        levels.append(level)
        before, stream = addition, None if level is None else level.total
    return levels


def _backward(chain: Sequence[AdditionGain], levels: Sequence[_Level | None]) -> list[float | None]:
    """Predict the gradient norm of the stream at each addition of a stream."""
    befores = [None, *chain[:-1]]
    measured = [addition.sent_back(before) for addition, before in zip(chain, befores, strict=True)]
    gains = typical(chain, measured)
    passed = typical(chain, [addition.passed(after) for addition, after in zip(chain, [*chain[1:], None], strict=True)])
    predictions: list[float | None] = []
    after: AdditionGain | None = None  # the nearest later addition with a gradient
    gradient: float | None = None  # squared gradient of the sum
    for index, addition in reversed(list(enumerate(chain))):
        before, level = befores[index], levels[index]
        if after is None or after.width != addition.width:
            gradient = addition.gradient
        elif gradient is not None:
            gradient = _through_norm(gradient, addition, level, passed[index])
        if gradient is not None:
            after = addition
        predicted = gains[index] is not None and not _unpredictable(addition, before)
        entering = _through_branch(gradient, addition, level, gains[index] if predicted else measured[index])
        stream_gradient = gradient if addition.copied and entering is not None else entering
        usable = predicted and stream_gradient is not None and math.isfinite(stream_gradient)
        predictions.append(stream_gradient**0.5 if usable and stream_gradient is not None else None)
        gradient = entering
    return predictions[::-1]


def _through_norm(gradient: float, addition: AdditionGain, level: _Level | None, passed: float | None) -> float | None:
    """Return the squared gradient before the norm on the stream that follows an addition, if there is one."""
    if addition.behind is None:
        return gradient
    gradient *= addition.behind * (1.0 if passed is None else passed)
    return gradient / level.total if level is not None and level.total else None


def _through_branch(gradient: float | None, addition: AdditionGain, level: _Level | None, gain: float | None) -> float | None:
    """Return the squared gradient of the stream that enters an addition."""
    if level is None or not level.stream or gain is None or gradient is None:
        return None
    return gradient * addition.factor * max(0.0, 1 + gain * addition.unit(level.stream) / level.stream)


def expected_gradient_step(sites: Sequence[SiteRecord], depth: int) -> float:
    """Predict the log factor by which a block scales the gradient going backward.

    Without a norm on the stream itself (pre, sandwich, reordered, none), g_k^2 = g_{k+1}^2 (1 + b/S), and
    b/S = (b/f) * update_ratio^2. With updates of equal size S grows in proportion to the depth l, so the step of a block is at
    most (b/f)/2 * ln((l+1)/l): a 1/sqrt(l) law for b/f = 1, a 1/l law for SwiGLU. That bound caps the prediction, so that an
    exploding forward pass does not excuse its gradients.

    Parameters
    ----------
    sites
        Sites of the block.
    depth
        Number of blocks before it, at least 1.

    Returns
    -------
    float
        Natural logarithm; 0 with a norm after each addition.

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
