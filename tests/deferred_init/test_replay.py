"""Replayed values depend on seed, parameter name and call index alone, and cost no more than they need to."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from propcheck.config.probe import load_probe
from propcheck.deferred_init import materialize as replay_module
from propcheck.deferred_init.keyed_rng import CHUNK, Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record
from propcheck.targets.decoder.task import decoder_task


@pytest.fixture(scope="module")
def workers():
    with Workers(2) as pool:
        yield pool


class Net(nn.Module):
    """Random in several ways; ``extra`` adds a module before the others, and with it random calls."""

    def __init__(self, *, extra=False):
        super().__init__()
        if extra:
            self.extra = nn.Linear(5, 5)
        self.embedding = nn.Embedding(30, 8)
        self.mixed = nn.Parameter(torch.empty(8, 8))
        nn.init.orthogonal_(self.mixed)
        with torch.no_grad():
            self.mixed.add_(torch.randn(8, 8) * 0.1)
        self.sparse = nn.Parameter(torch.empty(9, 4))
        nn.init.sparse_(self.sparse, 0.5)
        self.trunc = nn.Parameter(torch.empty(40))
        nn.init.trunc_normal_(self.trunc)
        self.linear = nn.Linear(8, 8).bfloat16()
        self.register_buffer("noise", torch.rand(5).log(), persistent=False)


def values(factory, seed, workers, order=1):
    recording = record(factory)
    replay = Materializer(recording, workers)
    return {entry.name: replay.materialize(entry, seed) for entry in recording.entries[::order]}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_values_depend_on_nothing_else(workers):
    expected = values(Net, 0, workers)
    with Workers(1) as one, Workers(3) as three:
        assert equal(values(Net, 0, one), expected)
        assert equal(values(Net, 0, three), expected)
    assert equal(values(Net, 0, workers, order=-1), expected)
    torch.manual_seed(7)
    torch.rand(5)
    assert equal(values(Net, 0, workers), expected)
    recording = record(Net)
    entry = next(entry for entry in recording.entries if entry.name == "linear.weight")
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        alone = Materializer(recording, workers).materialize(entry, 0)  # no other parameter was computed
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(alone, expected["linear.weight"])
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_factorisations_do_not_depend_on_the_threads_of_torch(workers):
    def build():
        module = nn.Linear(300, 300)
        nn.init.orthogonal_(module.weight)
        module.bias.data.copy_(module.weight.data.sum(0))
        return module

    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(values(build, 0, workers))
    torch.set_num_threads(before)
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    weight = found[0]["weight"].double()
    torch.testing.assert_close(weight.T @ weight, torch.eye(300, dtype=torch.float64), atol=1e-5, rtol=0)


def test_seeds_and_names_give_different_values_and_equal_names_equal_ones(workers):
    one, other = values(Net, 0, workers), values(Net, 1, workers)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    wider = values(lambda: Net(extra=True), 0, workers)
    assert wider.keys() > one.keys()
    assert equal({name: wider[name] for name in one}, one)
    layers = values(lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), 0, workers)
    assert len({layers[f"{index}.weight"].numpy().tobytes() for index in range(3)}) == 3


def test_placements_share_every_weight(workers):
    def decoder(placement):
        task = decoder_task(load_probe("tiny", [f"residual.placement={placement}"]))
        return lambda: task.build().model

    pre, post = values(decoder("pre"), 0, workers), values(decoder("post"), 0, workers)
    shared = pre.keys() & post.keys()
    assert pre.keys() - shared == {"final_norm.weight"}
    assert post.keys() == shared
    assert equal({name: pre[name] for name in shared}, post)


def test_the_constructor_finds_global_generators_in_the_same_state(workers):
    def build():
        return nn.ParameterList([torch.tensor([random.random(), np.random.rand()])])  # noqa: NPY002

    first = values(build, 0, workers)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert equal(values(lambda: torch.manual_seed(3) and build(), 0, workers), first)
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_made_from_random_values_of_another_agrees_with_it(workers):
    def build():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight.data = first.weight.data.t() * 2
        second.bias.data.copy_(first.bias.data)
        left, right = torch.randn(2, 6).unbind()
        return nn.ModuleList([first, second, nn.ParameterList([left, right.clone(), left + right])])

    got = values(build, 0, workers)
    assert torch.equal(got["1.weight"], got["0.weight"].t() * 2)
    assert torch.equal(got["1.bias"], got["0.bias"])
    assert torch.equal(got["2.2"], got["2.0"] + got["2.1"])
    assert not torch.equal(got["2.0"], got["2.1"])


def test_copies_of_a_layer_are_copies(workers):
    got = values(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3), 0, workers)
    names = [name.removeprefix("layers.0.") for name in got if name.startswith("layers.0.")]
    assert len(names) == 12
    for name in names:
        assert torch.equal(got[f"layers.0.{name}"], got[f"layers.2.{name}"])
    assert got["layers.0.linear1.weight"].std().item() == pytest.approx(1 / (3 * 8) ** 0.5, rel=0.15)  # uniform, ± 1/sqrt(8)


# --- what is run


def calls_run(factory, name, workers):
    recording = record(factory)
    replay = Materializer(recording, workers)
    entry = next(entry for entry in recording.entries if name in entry.names)
    draws = []

    def counted(function, args, kwargs, memory, key, workers):
        draws.append((function._schema.name.removeprefix("aten::"), key))
        return drawn(function, args, kwargs, memory, key, workers)

    drawn = replay_module.draw
    with mock.patch.object(replay_module, "draw", counted):
        value = replay.materialize(entry, 0)
    return draws, value


@pytest.mark.parametrize("overwrite", [
    lambda weight: nn.init.normal_(weight, std=0.02),
    lambda weight: weight.uniform_(-1, 1),
    lambda weight: weight.copy_(torch.rand(6, 6)),
    lambda weight: weight.view(-1).normal_(),
    lambda weight: weight[:].copy_(torch.rand(6)),
    lambda weight: torch.randn(6, 6, out=weight.data),
])  # fmt: skip
def test_a_call_that_is_wholly_overwritten_is_not_run(overwrite, workers):
    def build():
        module = nn.Linear(6, 6)
        with torch.no_grad():
            overwrite(module.weight)
        return module

    draws, value = calls_run(build, "weight", workers)
    assert len(draws) == 1
    assert draws[0][1] == (0, "weight", 0)
    assert value.isfinite().all()


def test_a_call_that_is_overwritten_in_part_is_run(workers):
    def build():
        module = nn.Linear(6, 6)
        with torch.no_grad():
            module.weight[:3].normal_()
            module.weight[0].zero_()
        return module

    draws, value = calls_run(build, "weight", workers)
    assert [name for name, _ in draws] == ["uniform_", "normal_"]
    assert value[0].eq(0).all()
    assert value[1:3].abs().max() > value[3:].abs().max()  # N(0, 1) against ± 1/sqrt(6)


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, lambda x: x.new_zeros(3), torch.empty_like])
def test_a_tensor_of_the_shape_of_another_does_not_need_its_values(like, workers):
    draws, _ = calls_run(lambda: nn.ParameterList([like(torch.randn(1000)), torch.ones(1)]), "0", workers)
    assert draws == []


def test_other_parameters_are_not_computed(workers):
    class Allocations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not any(
                isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == result.untyped_storage()._cdata
                for arg in args
            ):
                self.bytes += result.untyped_storage().nbytes()
            return result

    recording = record(lambda: nn.ModuleList([nn.Linear(1 << 20, 1 << 10), nn.Embedding(1 << 30, 4), nn.Linear(32, 32)]))
    replay = Materializer(recording, workers)
    entry = next(entry for entry in recording.entries if entry.name == "2.weight")
    with Allocations() as allocations:
        replay.materialize(entry, 0)
    assert 0 < allocations.bytes <= 2 * entry.nbytes  # the others have 20 GB


def test_a_call_that_several_parameters_share_has_one_seed(workers):
    def build():
        whole = torch.randn(3, 4)
        return nn.ParameterList([whole[0].clone(), whole[1].clone()])

    first, _ = calls_run(build, "0", workers)
    second, _ = calls_run(build, "1", workers)
    assert first == second == [("randn", (0, "0", 0))]


@pytest.mark.parametrize("build", [
    lambda: nn.Linear(70, 30),
    lambda: nn.Linear(70, 30, dtype=torch.bfloat16),
    lambda: nn.ParameterDict({"weight": torch.randn(70, 30)}),
    lambda: nn.ParameterDict({"weight": torch.empty(70, 30).uniform_(0.01, 16).log_()}),
])  # fmt: skip
def test_the_memory_that_is_given_is_where_the_value_is_computed(build, workers):
    recording = record(build)
    replay = Materializer(recording, workers)
    entry = recording.entries[0]
    out = torch.full((70 * 30,), 7, dtype=entry.dtype)
    seen = []

    def noted(function, args, kwargs, memory, key, workers):
        seen.append(memory.data_ptr())
        return drawn(function, args, kwargs, memory, key, workers)

    drawn = replay_module.draw
    with mock.patch.object(replay_module, "draw", noted):
        value = replay.materialize(entry, 0, out)
    assert seen == [out.data_ptr()]
    assert value.data_ptr() == out.data_ptr()
    assert torch.equal(value, replay.materialize(entry, 0))
    assert torch.equal(out.view(entry.shape), value)


def test_a_large_weight_is_filled_in_chunks_in_place(workers):
    recording = record(lambda: nn.Embedding(CHUNK // 64 + 1, 64, dtype=torch.bfloat16))
    replay = Materializer(recording, workers)
    entry = recording.entries[0]
    out = torch.empty(entry.shape, dtype=entry.dtype)
    value = replay.materialize(entry, 0, out)
    assert value.data_ptr() == out.data_ptr()
    assert value.float().std().item() == pytest.approx(1, rel=0.01)
    assert value[-1].float().std().item() == pytest.approx(1, rel=0.5)


# --- memory that nothing wrote


NEVER_WRITTEN = {
    "empty": lambda: torch.empty(3),
    "cast": lambda: torch.empty(3).bfloat16(),
    "clone": lambda: torch.empty(3).clone(),
    "view": lambda: torch.empty(6).view(2, 3)[1],
    "cat": lambda: torch.cat((torch.empty(3), torch.empty(2))),
    "copy": lambda: torch.empty_like(torch.ones(3)).copy_(torch.empty(3)),
    "scaled": lambda: torch.empty(3).mul_(0.02),
    "double": lambda: torch.empty(3, dtype=torch.float64),
    "complex": lambda: torch.empty(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("tensor", NEVER_WRITTEN.values(), ids=NEVER_WRITTEN.keys())
def test_memory_that_no_call_wrote_is_nan_and_has_no_calls(tensor, workers):
    recording = record(lambda: nn.ParameterList([nn.Parameter(tensor())]))
    replay = Materializer(recording, workers)
    assert replay.materialize(recording.entries[0], 0).isnan().all()
    assert replay.init_calls(recording.entries[0]) is None


def test_integers_that_no_call_wrote_are_the_greatest_of_their_dtype(workers):
    module = nn.Module()

    def build():
        module.register_buffer("index", torch.empty(3, dtype=torch.int64))
        module.register_buffer("flags", torch.empty(2, dtype=torch.bool))
        return module

    recording = record(build)
    replay = Materializer(recording, workers)
    index, flags = (replay.materialize(entry, 0) for entry in recording.entries)
    assert index.tolist() == [2**63 - 1] * 3
    assert flags.tolist() == [True, True]
    assert [replay.init_calls(entry) for entry in recording.entries] == [None, None]


def test_what_is_left_between_partial_writes_is_nan(workers):
    def build():
        weight = torch.empty(4)
        weight[:2] = 1.0
        return nn.ParameterList([weight])

    _, value = calls_run(build, "0", workers)
    assert value[:2].tolist() == [1, 1]
    assert value[2:].isnan().all()


# --- the calls in words


def scaled(weight):
    nn.init.normal_(weight, std=0.02)
    weight.data *= 0.5


CALLS = {
    "normal_(0, 0.02)": lambda weight: nn.init.normal_(weight, std=0.02),
    "normal_(0, 0.02), mul_(0.5)": scaled,
    "trunc_normal_(0, 0.02, -2, 2)": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "uniform_(-0.707107, 0.707107)": nn.init.xavier_uniform_,  # sqrt(6 / (6 + 6))
    "zero_()": nn.init.zeros_,
    "fill_(0.7)": lambda weight: nn.init.constant_(weight, 0.7),
    "uniform_(0.01, 16), log_()": lambda weight: weight.data.uniform_(0.01, 16).log_(),
    "constant, copy_()": lambda weight: weight.data.copy_(torch.tensor([1.0, 2, 3, 4, 5, 6])),
    "randn(), mul(0.1), copy_()": lambda weight: weight.data.copy_(torch.randn(6, 6) * 0.1),
    "zero_(), fill_(1)": lambda weight: weight.data.zero_().fill_diagonal_(1),
}


@pytest.mark.parametrize(("text", "init"), CALLS.items(), ids=CALLS.keys())
def test_calls_read_as_they_were_written(text, init, workers):
    def build():
        module = nn.Linear(6, 6)
        init(module.weight)
        return module

    recording = record(build)
    assert Materializer(recording, workers).init_calls(recording.entries[0]) == text


def test_calls_name_casts_and_tensors_from_outside(workers):
    outside = torch.ones(3)
    recording = record(lambda: nn.ParameterList([nn.Parameter(outside), outside * 2, torch.zeros(3).bfloat16()]))
    replay = Materializer(recording, workers)
    assert [replay.init_calls(entry) for entry in recording.entries] == [
        "constant",
        "constant, mul(2)",
        "zeros(), to(bfloat16)",
    ]


def test_repeated_calls_are_written_once(workers):
    def build():
        module = nn.Linear(50, 300)
        nn.init.sparse_(module.weight, 0.1)
        return module

    recording = record(build)
    text = Materializer(recording, workers).init_calls(recording.entries[0])
    assert text.startswith("normal_(0, 0.01), ")
    assert text.endswith("x 50")  # columns
    assert "randperm(300)" in text
    assert len(text) < 200
