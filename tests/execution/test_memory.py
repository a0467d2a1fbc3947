"""A streamed scan holds one block at a time, and a parameter that is not in memory is NaN."""

import pytest
import torch

from propcheck.config.probe import Probe
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.execution import passes as engine
from propcheck.execution import single_pass
from propcheck.execution.weights import Weights
from propcheck.targets.decoder.task import decoder_task

DECODERS = {
    "pre": {"layers": 5, "width": 48, "vocabulary": 97, "mixers": ["deltanet", "attention"]},
    "post, tied": {"layers": 5, "width": 48, "vocabulary": 97, "tied_head": True},
}


@pytest.mark.parametrize("name", DECODERS)
def test_one_block_is_in_memory_at_a_time_and_none_is_left(name, monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)
    held, seen = [], []
    bring = Weights.bring

    def watched(self, unit):
        bring(self, unit)
        present = {path for path in self.tensors if path.startswith("blocks.") and self.present(path)}
        held.append({path.split(".")[1] for path in present})
        seen.append(self)

    monkeypatch.setattr(Weights, "bring", watched)
    residual = {"placement": name.split(",", maxsplit=1)[0]}
    probe = Probe.model_validate({"model": DECODERS[name], "residual": residual, "inputs": {"tokens": 9}})
    with Workers(1) as workers:
        one = engine.execute(decoder_task(probe), 0, memory=0, device=torch.device("cpu"), workers=workers)
    assert one.mode == "streamed"
    assert max(map(len, held)) == 1
    assert sum(map(len, held)) == 10  # each block forward, and again backward
    left = [path for path in seen[-1].tensors if seen[-1].present(path)]
    assert left == []
    assert all(torch.isnan(seen[-1].tensors[path]).all() for path in seen[-1].tensors)
