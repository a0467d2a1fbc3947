"""A batch may be made where the model is made, where its tensors are fake: it gets values like a parameter, and is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import RESIDENT, WIDTH, Block
from torch import nn

from propcheck.deferred_init.keyed_rng import Workers, generator_for
from propcheck.deferred_init.record import record
from propcheck.errors import PropcheckError
from propcheck.execution import passes as engine
from propcheck.targets.target import Target, Task


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)
        self.seen = []

    def forward(self, pixel_values, labels=None, scale=1.0):
        self.seen.append((pixel_values, labels))
        x = self.patches(pixel_values * scale).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(1))
        return logits if labels is None else (logits, F.cross_entropy(logits, labels))


def scan(build, seed=0, memory=RESIDENT):
    built = []

    def both():
        built.append(build())
        return built[0]

    task = Task(both, lambda _model, _seed: torch.zeros(1, 1))
    with Workers(1) as workers:
        one = engine.execute(task, seed, memory=memory, device=torch.device("cpu"), workers=workers)
    return one, built[-1].model.seen[-1]


def keywords():
    return Target(
        Vision(), batch={"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,)), "scale": 0.5}
    )


@pytest.mark.parametrize("memory", [0, RESIDENT], ids=["streamed", "resident"])
def test_random_tensors_of_the_constructor_are_values_of_the_seed(memory):
    one, (pixels, labels) = scan(keywords, memory=memory)
    # 6144 draws: the mean is within 5 / sqrt(6144), the deviation about as near to 1
    assert abs(pixels.mean()) < 0.07
    assert pixels.std() == pytest.approx(1, abs=0.07)
    assert labels.dtype == torch.int64
    assert 0 <= labels.min() <= labels.max() < 10
    assert one.inputs == (2, 3)
    again, (same, _) = scan(keywords, memory=memory)
    assert torch.equal(pixels, same)
    assert one.loss == again.loss
    _, (other, _) = scan(keywords, seed=1, memory=memory)
    assert not torch.equal(pixels, other)


def test_they_are_no_parameters():
    one, _ = scan(keywords)
    assert {entry.kind for entry in one.entries} == {"parameter"}
    assert not any("batch" in entry.name for entry in one.entries)
    assert one.used == {entry.name for entry in one.entries}


def test_the_weights_do_not_depend_on_whether_the_batch_is_made_there():
    def without():
        torch.manual_seed(0)
        return Target(Vision(), batch=lambda: torch.ones(2, 3, 32, 32), loss=lambda y, _: y.square().mean())

    def within():
        pixels = torch.ones(2, 3, 32, 32) * torch.rand(()).clamp(1, 1)
        return Target(Vision(), batch=(pixels,), loss=lambda y, _: y.square().mean())

    assert scan(without)[0].loss == scan(within)[0].loss


@pytest.mark.parametrize(
    "batch",
    [
        lambda: {"pixel_values": torch.from_numpy(np.ones((2, 3, 32, 32), np.float32))},
        lambda: (torch.from_numpy(np.ones((2, 3, 32, 32), np.float32)),),
        lambda: [torch.ones(2, 3, 32, 32)],
        lambda: torch.ones(2, 3, 32, 32),
        lambda: lambda: torch.ones(2, 3, 32, 32),
        lambda: lambda seed: torch.ones(2, 3, 32, 32) + 0 * seed,
        lambda: torch.ones(2, 3, 32, 32, requires_grad=True),
        lambda: torch.tensor(np.ones((2, 3, 32, 32), np.float32)),
    ],
)
def test_known_values_come_as_they_are(batch):
    _, (pixels, _) = scan(lambda: Target(Vision(), batch=batch(), loss=lambda y, _: y.square().mean()))
    assert torch.equal(pixels, torch.ones(2, 3, 32, 32))


def test_a_batch_function_is_a_function_of_the_seed():
    def build():
        return Target(Vision(), batch=lambda: torch.randn(2, 3, 32, 32), loss=lambda y, _: y.square().mean())

    _, (pixels, _) = scan(build, seed=3)
    torch.manual_seed(generator_for("batch", 3).initial_seed())
    assert torch.equal(pixels, torch.randn(2, 3, 32, 32))


def test_targets_in_the_closure_of_a_loss_and_of_a_batch_have_values():
    def build():
        pixels, targets = torch.full((2, 3, 32, 32), 2.0), torch.tensor([3, 4])
        noise = torch.randn(2, 10)
        return Target(
            Vision(),
            batch=lambda: (pixels * 0.5,),
            loss=lambda logits, _: F.cross_entropy(logits + 0 * noise.T.T, targets) + 0 * torch.stack([noise, noise]).sum(),
        )

    one, (pixels, _) = scan(build)
    assert torch.equal(pixels, torch.ones(2, 3, 32, 32))
    known, _ = scan(
        lambda: Target(
            Vision(),
            batch=lambda: torch.ones(2, 3, 32, 32),
            loss=lambda logits, _: F.cross_entropy(logits, torch.tensor([3, 4])),
        )
    )
    assert one.loss == pytest.approx(known.loss, rel=1e-6)


def test_tensors_in_a_list_of_a_module_have_values():
    class Lists(Vision):
        def __init__(self):
            super().__init__()
            self.scales = [torch.full((WIDTH,), 3.0), {"bias": torch.arange(3.0)}]

        def forward(self, pixel_values):
            return super().forward(pixel_values + self.scales[1]["bias"].view(3, 1, 1)) * self.scales[0][:10]

    batch = torch.ones(2, 3, 32, 32)
    for memory in (0, RESIDENT):
        one, (pixels, _) = scan(lambda: Target(Lists(), batch=batch, loss=lambda y, _: y.square().mean()), memory=memory)
        assert pixels[0, :, 0, 0].tolist() == [1, 2, 3]
        assert one.loss > 0


def test_what_was_made_from_a_fake_tensor_later_is_refused_in_one_line():
    recording = record(lambda: nn.Linear(2, 2))
    fake = recording.model.weight * 2  # fake, and not of the record
    task = Task(lambda: Target(Vision(), batch=(fake,)), lambda *_: None)
    with Workers(1) as workers, pytest.raises(PropcheckError, match=r"a tensor \[2, 2\] that was made from another one"):
        engine.execute(task, 0, memory=RESIDENT, device=torch.device("cpu"), workers=workers)
