"""Every column of both tables for a reference decoder, from plain torch and numpy: nothing of propcheck.tracing is used.

The decoder runs as it is, with its residual additions replaced by the equations written out here, which keep the operands.
Gradients are autograd's; where a weight's gradient is measured through its factors, it is the fp64 product of the kept
gradient of the layer's output with the kept input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import propcheck.targets.decoder.model
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record
from propcheck.targets.decoder.task import decoder_task


@dataclass
class Addition:
    """What one residual addition read and wrote, with their gradients once the backward pass is over."""

    stream: torch.Tensor
    update: torch.Tensor
    total: torch.Tensor
    normed: torch.Tensor | None


@dataclass
class Reference:
    """A plain run: its additions in order, its parameters and their gradients' norms."""

    additions: list[Addition] = field(default_factory=list)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0


def run_plainly(probe, monkeypatch, seed=0) -> Reference:
    task = decoder_task(probe)
    recording = record(lambda: task.build().model)
    with Workers(1) as workers:
        materializer = Materializer(recording, workers)
        values = {entry.name: materializer.materialize(entry, seed) for entry in recording.entries}
    model = task.build().model
    for name, parameter in model.named_parameters():
        parameter.data = values[name]
    reference = Reference(values={name: value.double().numpy() for name, value in values.items()})

    def add_update(placement, stream, sublayer):
        norm, output_norm = sublayer.norm, sublayer.output_norm
        x, normed = stream, None
        if placement in ("pre", "sandwich"):
            normed = stream
            u = sublayer.function(norm(stream))
        else:
            u = sublayer.function(stream)
        if placement == "sandwich":
            u = output_norm(u)
        if placement == "reordered":
            u = norm(u)
        if placement == "deepnorm":
            x = x * sublayer.alpha
        u = sublayer.update(u)
        total = x + u
        for tensor in (x, u, total):
            tensor.retain_grad()
        reference.additions.append(Addition(x, u, total, normed))
        return norm(total) if placement in ("post", "deepnorm") else total

    monkeypatch.setattr(propcheck.targets.decoder.model, "add_update", add_update)
    uses: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def keep(module, args, output):
        output.retain_grad()
        uses.setdefault(names[id(module.weight)], []).append((args[0], output))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep)
    ids = task.batch(model, seed)
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    monkeypatch.undo()
    reference.loss = loss.item()
    for name, parameter in model.named_parameters():
        out, into = parameter.shape if parameter.dim() == 2 else (0, 0)
        if len(uses.get(name, ())) == 1 and "embedding" not in name and 3 * ids.numel() * (out + into) < out * into:
            ((x, y),) = uses[name]
            gradient = y.grad.double().flatten(0, 1).T @ x.double().flatten(0, 1)
        else:
            gradient = parameter.grad.double()
        reference.gradients[name] = float(np.linalg.norm(gradient.detach().numpy()))
    return reference


def columns(addition: Addition) -> dict[str, float | None]:
    """The measured columns of ``sublayers.parquet`` by their definitions, in fp64."""
    x, u, s = (tensor.detach().double().flatten(0, -2).numpy() for tensor in (addition.stream, addition.update, addition.total))
    as_written = {torch.float32: lambda a: a.astype(np.float32), torch.bfloat16: to_bfloat16}
    assert np.array_equal(as_written[addition.total.dtype](x + u), s)  # the exact sum, rounded once
    rms = {name: np.sqrt((value**2).mean()) for name, value in {"stream": x, "update": u, "sum": s}.items()}
    unit = s / np.linalg.norm(s, axis=1, keepdims=True)
    cosines = unit @ unit.T
    tokens = len(s)
    moved = u != 0
    found: dict[str, float | None] = {f"{name}_rms": value for name, value in rms.items()}
    found |= {
        f"{name}_norm": np.sqrt((np.linalg.norm(value, axis=1) ** 2).mean())
        for name, value in {"stream": x, "update": u, "sum": s}.items()
    }
    found |= {
        "stream_mean": x.mean(),
        "update_mean": u.mean(),
        "sum_mean": s.mean(),
        "sum_absmax": np.abs(s).max(),
        "update_ratio": rms["update"] / rms["stream"],
        "cosine": (x * u).sum() / np.linalg.norm(x) / np.linalg.norm(u) if moved.any() else None,
        "add_error": np.linalg.norm(s - (x + u)) / np.linalg.norm(u) if moved.any() else None,
        "swallowed": (s == x)[moved].mean() if moved.any() else None,
        "nonfinite": 0,
        "token_correlation": (cosines.sum() - np.trace(cosines)) / (tokens * (tokens - 1)),
        "norm_input_rms": None if addition.normed is None else np.sqrt((addition.normed.detach().double().numpy() ** 2).mean()),
    }
    for name, tensor in {"stream": addition.stream, "update": addition.update, "sum": addition.total}.items():
        found[f"grad_{name}_norm"] = np.linalg.norm(tensor.grad.double().numpy())
    return found


def to_bfloat16(exact: np.ndarray) -> np.ndarray:
    """Round fp64 to the nearest bf16, ties to even, by hand: 8 significant bits."""
    mantissa, exponent = np.frexp(exact)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)
