"""Make the task of the reference decoder that a probe configures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from propcheck.targets.decoder.model import Decoder
from propcheck.targets.inputs import token_ids
from propcheck.targets.precision import PRESETS
from propcheck.targets.target import Target, Task

if TYPE_CHECKING:
    from propcheck.config.probe import Probe


def decoder_task(probe: Probe) -> Task:
    """Return the task of ``probe``'s decoder: its token ids and the next-token loss."""
    preset = probe.precision.preset or "bf16"
    precision = PRESETS[preset]

    def build() -> Target:
        dtype_before = torch.get_default_dtype()
        torch.set_default_dtype(precision.parameters)
        try:
            return Target(Decoder(probe.decoder).train(probe.scan.mode == "train"))
        finally:
            torch.set_default_dtype(dtype_before)

    vocabulary = min(probe.model.vocabulary, probe.inputs.vocabulary or probe.model.vocabulary)
    return Task(
        build=build,
        batch=lambda _, seed: token_ids(probe.inputs, vocabulary, seed),
        autocast=precision.autocast,
        loss_scale=precision.loss_scale,
        precision=preset,
        source=probe.inputs.source,
    )
