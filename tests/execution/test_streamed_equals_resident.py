"""A streamed run gives the bits of a resident one: every parameter, statistic and gradient, at any budget."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from propcheck.config.probe import Probe
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.record import record
from propcheck.execution import passes as engine
from propcheck.execution import single_pass
from propcheck.execution.plan import divide, plan
from propcheck.measure.site_rows import site_records
from propcheck.targets.decoder.task import decoder_task

SMALL = {
    "layers": 4, "width": 48, "vocabulary": 97, "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"width": 80},
    "deltanet": {"key_heads": 2, "value_heads": 4, "key_head_width": 8, "value_head_width": 12, "chunk": 16},
}  # fmt: skip

DECODERS = {
    "pre-norm attention": {"model": SMALL},
    "deltanet and attention": {"model": {**SMALL, "mixers": ["deltanet", "attention"]}},
    "bf16 deltanet, gate, qk-norm": {
        "model": {
            **SMALL,
            "mixers": ["deltanet", "attention"],
            "attention": {"heads": 4, "kv_heads": 2, "qk_norm": True, "gate": True, "rotary": 0.5},
        },
        "precision": {"preset": "bf16", "keep_fp32": ["A_log", "dt_bias"]},
    },
    "post-norm, tied head": {"model": {**SMALL, "tied_head": True}, "residual": {"placement": "post"}},
    "sandwich, layerscale": {"model": SMALL, "residual": {"placement": "sandwich", "scale": "layerscale"}},
    "gpt2-like with dropout": {
        "model": {
            **SMALL, "dropout": 0.1, "positions": 64, "tied_head": True, "norm": {"kind": "layernorm"},
            "attention": {"heads": 4, "rotary": 0.0, "bias": True}, "ffn": {"kind": "gelu-tanh", "bias": True},
        }
    },
    "autocast": {"model": SMALL, "precision": {"preset": "bf16-mixed"}},
    "factored gradients": {"model": {**SMALL, "ffn": {"width": 512}, "width": 64}, "inputs": {"tokens": 9}},
}  # fmt: skip


@dataclass
class Result:
    mode: str
    rows: tuple
    gradients: dict
    census: dict
    loss: float


def probe_of(settings: dict) -> Probe:
    return Probe.model_validate({"precision": {"preset": "fp32"}, "inputs": {"tokens": 33, "batch": 2}, **settings})


def run(settings: dict, memory: int, workers: Workers) -> Result:
    one = engine.execute(decoder_task(probe_of(settings)), 0, memory=memory, device=torch.device("cpu"), workers=workers)
    rows = site_records(one.sites, 0, one.gradients)
    return Result(one.mode, rows, one.gradients, one.census, one.loss)


@pytest.fixture(autouse=True)
def _budget_is_the_models_alone(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def workers(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with Workers(request.param) as pool:
        yield pool
    torch.set_num_threads(before)


@pytest.mark.parametrize("settings", DECODERS.values(), ids=DECODERS.keys())
def test_every_number_is_equal_three_times_at_each_budget(settings, workers):
    expected = run(settings, 1 << 40, workers)
    assert expected.mode == "resident"
    assert len(expected.rows) == 8
    assert all(row.grad_sum_norm is not None and row.param_grad_norm is not None for row in expected.rows)
    budgets = one_budget_a_plan(settings)
    assert {mode for mode, _ in budgets} == {"streamed", "partly resident", "resident"}
    partly = [key for key in budgets if key[0] == "partly resident"]
    # Every plan in between for one decoder, the middle one for the others.
    chosen = partly if settings is DECODERS["bf16 deltanet, gate, qk-norm"] else partly[len(partly) // 2 :][:1]
    for mode, size in [next(iter(budgets)), *chosen]:
        memory = budgets[mode, size]
        for _ in range(3):
            got = run(settings, memory, workers)
            assert got.mode == mode
            assert got.loss == expected.loss
            assert got.rows == expected.rows
            assert got.gradients == expected.gradients
            assert got.census == expected.census


def one_budget_a_plan(settings: dict) -> dict[tuple[str, int], int]:
    """Return the least budget, in steps of 50 kB, for each set of resident units."""
    probe = probe_of(settings)
    recording = record(lambda: decoder_task(probe).build().model)
    units, permanent, _ = divide(recording.model, recording.entries)
    fixed = sum(entry.nbytes for entry in permanent)
    found: dict[tuple[str, int], int] = {}
    for memory in range(0, 40_000_000, 50_000):
        chosen = plan(units, memory - fixed, probe.inputs.batch * probe.inputs.tokens)
        found.setdefault((chosen.mode, len(chosen.resident)), memory)
    return found


def test_a_run_is_the_same_whatever_the_process_did_before(workers):
    first = run(DECODERS["gpt2-like with dropout"], 0, workers)
    torch.manual_seed(5)
    torch.rand(7)
    assert run(DECODERS["gpt2-like with dropout"], 0, workers) == first
