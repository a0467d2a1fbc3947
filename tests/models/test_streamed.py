"""Small models of the families of transformers, streamed: every number is the resident run's, bit for bit, three times.

A streamed backward pass can be wrong in nearly every gradient while the loss is right, and right the first time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from others import OTHERS
from small import small_config, whole_config

from propcheck.config.probe import Probe
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.execution import passes as engine
from propcheck.execution import single_pass
from propcheck.measure.site_rows import site_records
from propcheck.targets.huggingface import huggingface_task

RESIDENT, STREAMED = 1 << 40, 0
TYPES = {
    "gpt2": "fp32",  # learned positions, dropout, a tied head, GPT-2's own transposed layers
    "llama": "bf16",
    "qwen3_5_text": "bf16",  # gated delta rule and gated attention
    "gemma2": "bf16",  # norms before and after, tied head, soft caps
    "mixtral": "fp32",  # experts
    "deepseek_v3": "bf16",  # latent attention, dense and sparse layers
    "mamba": "fp32",
    "falcon_h1": "bf16",  # attention and state-space model beside each other
    "cohere": "bf16",  # parallel blocks of one norm
    "olmo2": "bf16",  # reordered norms
    "gpt_neox": "fp32",  # parallel blocks of two norms
}
FAMILIES = TYPES | {"t5": "fp32"}  # encoder and decoder, one table of look-ups at four places


@dataclass
class Result:
    mode: str
    loss: float
    rows: tuple
    gradients: dict
    census: dict


@pytest.fixture(autouse=True)
def _budget_is_the_models_alone(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    def task(family):
        folder = tmp_path_factory.mktemp(family)
        (whole_config(family) if family in TYPES else OTHERS[family]()[0].config).save_pretrained(folder)
        settings = {"huggingface": {"config": str(folder)}, "precision": {"preset": FAMILIES[family]}}
        return huggingface_task(Probe.model_validate({**settings, "inputs": {"tokens": 16, "batch": 2}}))

    return task


def run(task, memory):
    with Workers(1) as workers, task.around():
        one = engine.execute(task, 0, memory=memory, device=torch.device("cpu"), workers=workers)
    assert one.notes == ()  # neither built nor run in another than the usual way
    return Result(one.mode, one.loss, site_records(one.sites, 0, one.gradients), one.gradients, one.census)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_streamed_run_is_the_resident_one(family, tasks):
    task = tasks(family)
    expected = run(task, RESIDENT)
    assert expected.mode == "resident"
    assert len(expected.rows) >= 3
    assert all(row.grad_sum_norm > 0 and row.param_grad_norm > 0 for row in expected.rows)
    assert len(expected.gradients) > 2 * len(expected.rows)
    for _ in range(3):
        got = run(task, STREAMED)
        assert got.mode == "streamed"
        assert got.loss == expected.loss
        assert got.rows == expected.rows
        assert got.gradients == expected.gradients
        assert got.census == expected.census


def test_the_families_differ_in_how_their_blocks_are_built():
    assert len(FAMILIES) >= 10
    assert len({type(small_config(family)) for family in TYPES}) == len(TYPES)
