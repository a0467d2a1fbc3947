"""The reference decoder that a probe file describes, as a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from propcheck.decoder.model import Decoder
from propcheck.inputs import token_ids
from propcheck.targets.target import Target, Task

if TYPE_CHECKING:
    from propcheck.probe import Probe

_PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "bf16-mixed": torch.float32}

# Nobody trains in fp16 without scaling the loss: gradients of single elements lie below its least number, 6e-8. torch's
# GradScaler starts at 2^16 and backs off when something overflows; 2^10 leaves room for the gradients of small embeddings.
_FP16_LOSS_SCALE = 2.0**10


def decoder_task(probe: Probe) -> Task:
    """Return the decoder of ``probe`` with its inputs; its loss is the next-token loss."""
    preset = probe.precision.preset

    def build() -> Target:
        before = torch.get_default_dtype()
        torch.set_default_dtype(_PARAMETER_DTYPES[preset])
        try:
            return Target(Decoder(probe.decoder).train(probe.scan.mode == "train"))
        finally:
            torch.set_default_dtype(before)

    return Task(
        build=build,
        batch=lambda _, seed: token_ids(probe.inputs, probe.model.vocabulary, seed),
        autocast=torch.bfloat16 if preset == "bf16-mixed" else None,
        loss_scale=_FP16_LOSS_SCALE if preset == "fp16" else 1.0,
    )
