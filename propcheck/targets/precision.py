"""Precision presets: the dtypes of a target, its loss scale, and the name of its precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# fp16 training scales the loss, because gradients of single elements lie below the smallest fp16 number, 6e-8. torch's
# GradScaler starts at 2^16 and backs off on overflow; 2^10 leaves room for the gradients of small embeddings.
_FP16_LOSS_SCALE = 2.0**10
_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of parameters, the dtype of matrix products under autocast (None without it), and the loss scale."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None
    loss_scale: float = 1.0


PRESETS = {
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale=_FP16_LOSS_SCALE),
    "fp32": Precision(torch.float32),
    "bf16-mixed": Precision(torch.float32, autocast=torch.bfloat16),
}


def preset_of(dtype: torch.dtype) -> str | None:
    """Return the preset whose parameters have ``dtype``; None if there is none."""
    return next((name for name, preset in PRESETS.items() if preset.parameters == dtype), None)


def precision_of(dtypes: Iterable[torch.dtype]) -> str:
    """Name the floating-point dtypes of parameters: ``fp32``, or ``mixed (bf16, fp32)``."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    names = sorted(_SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in floating)
    return names[0] if len(names) == 1 else f"mixed ({', '.join(names)})" if names else "none"
