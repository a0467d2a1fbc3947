"""The reference decoder that a probe file describes, as a target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from propcheck.decoder.model import Decoder
from propcheck.inputs import token_ids
from propcheck.targets.target import Target

if TYPE_CHECKING:
    from torch import Tensor, nn

    from propcheck.probe import Probe

_PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "bf16-mixed": torch.float32}

# Nobody trains in fp16 without scaling the loss: gradients of single elements lie below its least number, 6e-8. torch's
# GradScaler starts at 2^16 and backs off when something overflows; 2^10 leaves room for the gradients of small embeddings.
_FP16_LOSS_SCALE = 2.0**10


def decoder_target(probe: Probe) -> Target:
    """Return the decoder of ``probe`` with its inputs and the next-token loss."""
    preset = probe.precision.preset

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(_PARAMETER_DTYPES[preset])
        try:
            return Decoder(probe.decoder).train(probe.scan.mode == "train")
        finally:
            torch.set_default_dtype(before)

    return Target(
        build=build,
        batch=lambda seed: (token_ids(probe.inputs, probe.model.vocabulary, seed),),
        loss=next_token_loss,
        tokens=probe.inputs.batch * probe.inputs.tokens,
        uniform_loss=math.log(probe.model.vocabulary),
        autocast=torch.bfloat16 if preset == "bf16-mixed" else None,
        loss_scale=_FP16_LOSS_SCALE if preset == "fp16" else 1.0,
    )


def next_token_loss(logits: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy, in fp32, of each token under the logits of the position before it.

    Parameters
    ----------
    logits
        [batch, tokens, vocabulary].
    inputs
        The token ids [batch, tokens], alone.
    """
    (ids,) = inputs
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
