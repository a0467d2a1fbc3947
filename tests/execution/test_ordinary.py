"""A model whose construction cannot be recorded is built as any program would build it, within the budget."""

from __future__ import annotations

import inspect
import io
import random
import re

import numpy as np
import pytest
import torch
from plain import IDS, RESIDENT, STREAMED, WIDTH, Block, Model, cross_entropy, scan
from torch import nn
from torch.nn.utils import parametrizations
from uncuttable import SharedDict

from propcheck.errors import PropcheckError
from propcheck.execution import build as built
from propcheck.execution import single_pass
from propcheck.seeding import generator_for


def random_width():
    model = Model()
    model.head = nn.Sequential(nn.Linear(WIDTH, hidden := int(torch.randint(20, 30, ()).item())), nn.Linear(hidden, 31))
    return model


def branch_on_a_weight():
    model = Model()
    if model.head.weight.mean() > -1:
        nn.init.zeros_(model.head.bias)
    return model


def numpy_of_a_weight():
    model = Model()
    u, _, v = np.linalg.svd(model.head.weight.detach().numpy(), full_matrices=False)
    model.head.weight.data = torch.from_numpy(u @ v)
    return model


def orthogonal():
    model = Model()
    for block in model.blocks:
        block.inner = parametrizations.orthogonal(block.inner)
    return model


def lazy():
    model = Model()
    model.head = nn.LazyLinear(31)
    return model


FILE = io.BytesIO()
torch.save(nn.Linear(WIDTH, 31).state_dict(), FILE)


def loaded():
    FILE.seek(0)
    model = Model()
    model.head.load_state_dict(torch.load(FILE))
    return model


def sparse():
    model = Model()
    model.mask = torch.eye(WIDTH).to_sparse()
    forward = model.run
    model.run = lambda x: forward(x) + torch.sparse.mm(model.mask, x.flatten(0, 1).mT @ x.flatten(0, 1)).mean()
    return model


def numpy_and_random():
    model = random_width()
    model.register_buffer("drawn", torch.tensor([random.random(), np.random.random()]))  # noqa: NPY002
    return model


BUILDS = [random_width, branch_on_a_weight, numpy_of_a_weight, orthogonal, lazy, loaded, sparse, numpy_and_random]


def reference(build, seed=0):
    start = generator_for("ordinary", seed).initial_seed()
    saved = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(start % (1 << 32))
    np.random.seed(start % (1 << 32))  # noqa: NPY002
    torch.manual_seed(start)
    model = build()
    with torch.no_grad():
        if build is lazy:
            model(IDS)
    random.setstate(saved[0])
    np.random.set_state(saved[1])  # noqa: NPY002
    loss = cross_entropy(model(IDS), None)
    loss.backward()
    return model, loss.item(), {name: one.grad.double().norm().item() for name, one in model.named_parameters()}


@pytest.mark.parametrize("build", BUILDS, ids=[build.__name__ for build in BUILDS])
def test_it_gives_the_same_columns_and_the_gradients_of_plain_autograd(build):
    one = scan(build, RESIDENT)
    model, loss, gradients = reference(build)
    assert one.loss == pytest.approx(loss, rel=1e-6)
    assert one.gradients == pytest.approx(gradients, rel=5e-6)
    assert len(one.sites) == 3
    assert one.mode == "resident"
    assert set(one.init_calls.values()) == {"built without a record"}
    assert {entry.name for entry in one.entries if entry.kind == "parameter"} == dict(model.named_parameters()).keys()
    assert one.census.keys() == {entry.name for entry in one.entries}
    head = [name for name in gradients if name.startswith("head.") and name.endswith("weight")][-1]
    assert one.census[head].std == pytest.approx(dict(model.named_parameters())[head].std(correction=0).item(), rel=1e-5)


@pytest.mark.parametrize("build", [random_width, branch_on_a_weight, numpy_of_a_weight])
def test_one_sentence_says_that_it_happened_and_where(build):
    (note,) = scan(build, RESIDENT).notes
    file, line = re.match(r"(.*?):(\d+): the code that builds the model ", note).groups()
    lines, first = inspect.getsourcelines(build)
    assert file == __file__
    assert first <= int(line) < first + len(lines)
    assert note.endswith("so it was built as a whole, in memory, and init_calls cannot say what gave its values.")
    assert note.count(". ") == 0


def test_values_are_a_function_of_the_seed_and_generators_are_left_alone():
    states = torch.get_rng_state(), random.getstate()
    first, again, other = (scan(numpy_and_random, RESIDENT, seed=seed) for seed in (0, 0, 1))
    assert first.census == again.census
    assert first.gradients == again.gradients
    assert first.census["drawn"] != other.census["drawn"]
    assert first.census["tokens.weight"] != other.census["tokens.weight"]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_an_error_of_the_code_is_its_own_and_not_tried_again():
    tries = []

    def broken():
        tries.append(1)
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        scan(broken, RESIDENT)
    assert len(tries) == 1

    def broken_only_whole():
        if random_width().head[0].out_features:
            raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        scan(broken_only_whole, RESIDENT)


def test_one_that_cannot_be_cut_either_runs_whole():
    def build():
        model = SharedDict()
        if model.head.weight.mean() > -1:
            return model
        raise AssertionError

    one = scan(build, RESIDENT)
    _, loss, gradients = reference(build)
    assert one.loss == pytest.approx(loss, rel=1e-6)
    assert one.gradients == pytest.approx(gradients, rel=5e-6)
    assert len(one.notes) == 2


def test_what_does_not_fit_is_refused_while_it_is_built(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)
    reached = []

    def large():
        width = int(torch.randint(5, 6, ()).item())
        for _ in range(100):
            reached.append(nn.Linear(1 << 10, 1 << 10))  # noqa: PERF401 - 4 MiB each
        return nn.Linear(width, width)

    def in_use():
        return (100 << 20) + sum(layer.weight.nbytes for layer in reached if isinstance(layer, nn.Linear))

    monkeypatch.setattr(built, "resident_bytes", in_use)
    with pytest.raises(
        PropcheckError, match=r"test_ordinary\.py:\d+: .*; so it is built as a whole, and does not fit"
    ) as caught:
        scan(large, 200 << 20)
    assert "\n" not in str(caught.value)
    assert 24 <= len(reached) <= 25  # 100 MiB by 4


def test_what_does_not_fit_with_its_activations_is_refused(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 1 << 30)
    with pytest.raises(PropcheckError, match=r"so all of it is in memory .* does not fit the memory budget"):
        scan(random_width, STREAMED + (1 << 30))


class Block8(Block):
    """Weights in eight bits, as quantised layers keep them."""

    def __init__(self):
        super().__init__()
        scale = self.inner.weight.abs().max().item() / 127
        self.register_buffer("codes", (self.inner.weight / scale).round().to(torch.int8))
        self.scale = scale
        del self.inner

    def update(self, x):
        return torch.nn.functional.rms_norm(x, (WIDTH,)) @ (self.codes.float() * self.scale).T


def test_quantised_weights():
    one = scan(lambda: Model(Block8), RESIDENT)
    _, loss, gradients = reference(lambda: Model(Block8))
    assert one.loss == pytest.approx(loss, rel=1e-6)
    assert one.gradients == pytest.approx(gradients, rel=5e-6)
    assert "blocks.1.codes" in {entry.name for entry in one.entries if entry.kind == "buffer"}
