"""A recording costs no memory and little time, and says plainly what it cannot record."""

from __future__ import annotations

import inspect
import io
import pickle
import re
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from propcheck.config.probe import load_probe
from propcheck.deferred_init.dependencies import Slicer
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.op_log import RecordedOperation, TensorRef
from propcheck.deferred_init.record import NotRecordedError, record
from propcheck.errors import PropcheckError
from propcheck.targets.decoder.task import decoder_task


def test_the_model_is_whole_and_its_tensors_are_fake():
    recording = record(lambda: nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.BatchNorm1d(1 << 20)))  # 4 TiB
    assert isinstance(recording.model, nn.Sequential)
    assert [(entry.name, entry.kind) for entry in recording.entries] == [
        ("0.weight", "parameter"), ("0.bias", "parameter"), ("1.weight", "parameter"), ("1.bias", "parameter"),
        ("1.running_mean", "buffer"), ("1.running_var", "buffer"), ("1.num_batches_tracked", "buffer"),
    ]  # fmt: skip
    assert recording.entries[0].nbytes == 1 << 42
    assert all(isinstance(parameter, FakeTensor) for parameter in recording.model.parameters())


def test_names_of_one_parameter_are_together_and_frozen_ones_are_known():
    def build():
        module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2)})
        module.b.weight = module.a.weight
        module.c.bias.requires_grad_(False)
        return module

    names = {entry.names: entry.requires_grad for entry in record(build).entries}
    assert names == {("a.weight", "b.weight"): True, ("c.weight",): True, ("c.bias",): False}


def test_tensors_that_are_plain_attributes_have_values_too():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = torch.outer(torch.arange(3.0), torch.arange(2.0))

        def forward(self, x):
            return x + self.table

    recording = record(lambda: nn.Sequential(Rotary()))
    entry = recording.entries[-1]
    assert (entry.name, entry.kind, entry.shape) == ("0.table", "buffer", (3, 2))
    with Workers(1) as workers:
        recording.model[0].table = Materializer(recording, workers).materialize(entry, 0)
    assert recording.model(torch.zeros(3, 2)).tolist() == [[0, 0], [0, 1], [0, 2]]
    assert "0.table" not in recording.model.state_dict()


def test_the_27b_decoder_is_recorded_in_seconds():
    task = decoder_task(load_probe("qwen3.8-27b"))
    record(lambda: nn.Linear(2, 2))  # the first use of fake tensors imports much
    started = time.process_time()
    recording = record(lambda: task.build().model)
    with Workers(1) as workers:
        materializer = Materializer(recording, workers)
    assert time.process_time() - started < 6  # 0.7 s on a free core
    # 64 layers of 5120, 48 of them with DeltaNet: the published size is 27 B.
    parameters = sum(entry.nbytes for entry in recording.entries if entry.kind == "parameter") / 2
    assert parameters == pytest.approx(27e9, rel=0.03)
    assert {materializer.init_calls(entry) for entry in recording.entries} <= {
        "normal_(0, 0.02)", "zero_()", "fill_(1)", "uniform_(0.01, 16), log_()",
    }  # fmt: skip


def test_a_storage_that_is_written_many_times_is_followed_in_linear_time():
    weight = TensorRef(0, 0, (4,), (1,), torch.float32)
    empty = torch.ops.aten.empty.memory_format, ([4],), {}, (), (), (), (weight,), True, torch.float32
    scaling = torch.ops.aten.mul_.Tensor, (weight, 2), {}, (weight,), (weight,), (weight,), (weight,), False, torch.float32
    log = [RecordedOperation(*empty), *(RecordedOperation(*scaling) for _ in range(30_000))]
    started = time.process_time()
    piece = Slicer(log).slice(weight)
    assert time.process_time() - started < 5  # 0.3 s on a free core; with the square of the number of writes, half an hour
    assert piece.operations == tuple(range(30_001))
    assert piece.valued == frozenset(piece.operations)


# --- what cannot be recorded


def random_item():
    return nn.Linear(2, int(torch.randint(1, 5, ()).item()))


def branch_on_a_weight():
    module = nn.Linear(2, 2)
    if module.weight.mean() > 0:
        nn.init.zeros_(module.bias)
    return module


def mask_of_random_values():
    weight = torch.randn(5)
    return nn.ParameterList([weight[weight > 0]])


def never_written_item():
    return nn.Linear(2, int(torch.empty(()).item()))


def numpy_of_a_weight():
    return nn.ParameterList([torch.from_numpy(nn.Linear(2, 2).weight.detach().numpy())])


def lazy():
    return nn.LazyLinear(3)


FILE = io.BytesIO()
torch.save(torch.ones(3), FILE)


def weights_of_a_file():
    FILE.seek(0)
    return nn.ParameterList([torch.load(FILE)])


def formatted():
    module = nn.Linear(2, 2)
    f"{module.weight[0, 0]:.3f}"
    return module


def pickled():
    module = nn.Linear(2, 2)
    pickle.dumps(module)
    return module


def compressed():
    return nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False)])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (random_item, "reads a value of a tensor that is random"),
        (branch_on_a_weight, "reads a value of a tensor that is random"),
        (never_written_item, "or was never written"),
        (mask_of_random_values, "makes a tensor whose shape depends on the values"),
        (numpy_of_a_weight, r"\.numpy\(\) is not supported"),
        (lazy, "cannot be recorded"),
        (weights_of_a_file, "reads a file of weights"),
        (formatted, r"unsupported format string"),
        (pickled, "cannot be recorded"),
        (compressed, "cannot be recorded"),
    ],
)
def test_what_cannot_be_recorded_is_one_line_with_its_place(build, reason):
    with pytest.raises(NotRecordedError, match=reason) as caught:
        record(build)
    assert str(caught.value).startswith(caught.value.reason)
    message = str(caught.value)
    assert "\n" not in message
    file, line = re.match(r"(.*?):(\d+): ", message).groups()
    lines, first = inspect.getsourcelines(build)
    assert file == __file__
    assert first <= int(line) < first + len(lines)


def test_what_is_no_module_is_named():
    with pytest.raises(PropcheckError, match=r"must build a torch\.nn\.Module, it built a int"):
        record(lambda: 3)


def test_an_error_of_the_code_itself_stays_as_it_is():
    def build():
        raise KeyError("hidden_size")

    with pytest.raises(KeyError, match="hidden_size"):
        record(build)


def test_a_tensor_of_the_record_is_known_and_has_its_value():
    kept = []

    def build():
        module = nn.Linear(2, 2)
        kept[:] = [torch.arange(3.0) * 2, torch.randn(4), module.weight.detach()]
        return module

    recording = record(build)
    with Workers(1) as workers:
        materializer = Materializer(recording, workers)
        ramp, noise, weight = (materializer.value(tensor, name, 0) for tensor, name in zip(kept, "abc", strict=True))
        assert torch.equal(noise, materializer.value(kept[1], "b", 0))
        assert not torch.equal(noise, materializer.value(kept[1], "b", 1))
        assert torch.equal(weight, materializer.materialize(recording.entries[0], 0))
    assert ramp.tolist() == [0, 2, 4]
    assert materializer.value(kept[0] + 1, "later", 0) is None
    assert materializer.value(torch.ones(3), "real", 0) is None


def test_compiled_parts_are_put_back():
    def build():
        model = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
        model[1].compile()
        return torch.compile(model)

    recording = record(build)
    assert type(recording.model) is nn.Sequential
    assert [entry.name for entry in recording.entries] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(module._compiled_call_impl is None for module in recording.model.modules())


def test_torch_is_left_as_it_was():
    before = nn.init._no_grad_trunc_normal_, nn.Module._apply, FakeTensor.data_ptr, FakeTensor.__deepcopy__
    with pytest.raises(PropcheckError):
        record(random_item)
    record(lambda: nn.Linear(2, 2))
    assert (nn.init._no_grad_trunc_normal_, nn.Module._apply, FakeTensor.data_ptr, FakeTensor.__deepcopy__) == before
    assert "data_ptr" not in vars(FakeTensor)
    assert not isinstance(torch.ones(2), FakeTensor)
