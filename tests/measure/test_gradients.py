"""The gradient norm of a parameter is that of its dense gradient, whether it was formed or measured through its factors."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from propcheck.measure.gradients import Ledger, MeasuredEmbedding, MeasuredLinear, worth_factoring
from propcheck.measure.weight_calls import weight_runners
from propcheck.tracing.tracer import Tracer

WIDTH, VOCABULARY = 48, 200
IDS = torch.tensor([[3, 5, 3, 0, 3], [7, 0, 5, 9, 11]])  # 3, 5 and 0 are repeated


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(x + self.second(F.gelu(self.first(x))))


class Twice(Base):
    """Each weight is used twice."""

    def forward(self, ids):
        x = self.tokens(ids)
        for _ in range(2):
            x = x + self.second(F.gelu(self.first(x)))
        return self.head(x)


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight


class Padded(Base):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)


class PaddedFromTheEnd(Base):
    def forward(self, ids):
        x = F.embedding(ids, self.tokens.weight, padding_idx=-VOCABULARY + 3)
        return self.head(x + self.second(F.gelu(self.first(x))))


class TiedAndPadded(Tied):
    def __init__(self):
        super().__init__()
        self.tokens.padding_idx = 3


class LookedUpTwice(Base):
    def forward(self, ids):
        x = self.tokens(ids) + self.tokens(ids.flip(1)) + self.tokens(ids)
        return self.head(x + self.second(F.gelu(self.first(x))))


class UsedDirectly(Base):
    """Once through F.linear, once as an operand: part of the gradient is formed, part is not."""

    def forward(self, ids):
        x = self.tokens(ids) + 0.5 * self.tokens.weight[ids]
        h = self.first(x) + x @ self.first.weight.T
        return self.head(x + self.second(F.gelu(h)) + self.second.weight.mean(1))


class Flat(Base):
    """Inputs of two dimensions, with keywords."""

    def forward(self, ids):
        x = self.tokens(ids.flatten())
        return self.head(
            x + F.linear(input=F.gelu(F.linear(x, bias=self.first.bias, weight=self.first.weight)), weight=self.second.weight)
        )


class Unbatched(Base):
    """One vector, a weight that is a vector."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids):
        x = self.tokens(ids)
        first = self.second(F.gelu(self.first(x[0, 0])))
        return self.head(x + first) * F.linear(x, self.vector)[..., None]


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.tokens.requires_grad_(False)


class FrozenBias(Base):
    def __init__(self):
        super().__init__()
        self.first.bias.requires_grad_(False)


class Unused(Base):
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


class Renormed(Base):
    """torch changes the rows in place: left to torch, as are gradients scaled by frequency."""

    def forward(self, ids):
        x = F.embedding(ids, self.tokens.weight, scale_grad_by_freq=True)
        return self.head(x + self.second(F.gelu(self.first(x))))


MODELS = [
    Base, Twice, Tied, Padded, PaddedFromTheEnd, TiedAndPadded, LookedUpTwice, UsedDirectly, Flat, Unbatched, Frozen,
    FrozenBias, Unused, Renormed,
]  # fmt: skip


def loss_of(logits):
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), IDS.flatten().roll(1))


def build(kind):
    torch.manual_seed(0)
    return kind()


def observed(model, autocast=None, loss=loss_of):
    """Return the norm of every parameter's gradient as the ledger has it."""
    ledger = Ledger()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tracer = Tracer(names, runners=weight_runners(names, ledger))
    with tracer, torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        value = loss(model(IDS))
    value.backward()
    ledger.settle(dict(model.named_parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: float(norm) for name, norm in ledger.norms.items()}


def dense(model, loss=loss_of):
    """Return the norms of the gradients that autograd forms, of a copy in fp64: without rounding."""
    plain = copy.deepcopy(model).double()
    loss(plain(IDS)).backward()
    return {name: float(p.grad.norm()) for name, p in plain.named_parameters() if p.grad is not None}


@pytest.fixture
def measured(monkeypatch):
    """Collect the names of the weights that are measured through factors."""
    seen = []
    for function in (MeasuredLinear, MeasuredEmbedding):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda *args, apply=apply: seen.append(args[-1].args[0]) or apply(*args))
    return seen


@pytest.mark.parametrize("factored", [True, False], ids=["factored", "dense"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_norm_is_that_of_the_dense_gradient(kind, factored, measured, monkeypatch):
    monkeypatch.setattr(
        "propcheck.measure.weight_calls.worth_factoring", lambda x, w: factored and x.dim() > 1 and w.dim() == 2
    )
    model = build(kind)
    expected = dense(model)
    found = observed(model)
    assert found.keys() == expected.keys()
    assert {"first.weight", "head.weight"} & set(measured) or not factored or kind is Tied or kind is TiedAndPadded
    for name, norm in expected.items():
        assert found[name] == pytest.approx(norm, rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("kind", [Base, Twice, Tied, TiedAndPadded, UsedDirectly, Padded])
def test_under_autocast_the_gradient_is_that_of_the_rounded_factors(kind, monkeypatch):
    monkeypatch.setattr("propcheck.measure.weight_calls.worth_factoring", lambda *_: True)
    model = build(kind)
    found = observed(model, autocast=torch.bfloat16)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss_of(plain(IDS))
    value.backward()
    for name, parameter in plain.named_parameters():
        # Autograd rounds the products to bf16, 8 bits; the factored norm does not.
        assert found[name] == pytest.approx(float(parameter.grad.double().norm()), rel=4e-3), name


def test_the_factored_norm_is_that_of_the_product_of_the_factors_in_bf16():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(12, size, generator=generator).bfloat16() for size in (70, 90))
    weight = nn.Parameter(torch.randn(70, 90, generator=generator).bfloat16())
    ledger = Ledger()
    MeasuredLinear.apply(right, weight, None, partial(ledger.add, "weight")).backward(left)
    ledger.settle({"weight": weight})
    expected = np.linalg.norm(left.double().numpy().T @ right.double().numpy())
    assert float(ledger.norms["weight"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("left", "right"), [(1e-30, 1.0), (1e30, 1.0), (1.0, 1e25), (1e-36, 1e-3), (0.0, 1.0)])
def test_factors_whose_squares_leave_the_range_of_fp32(left, right, dtype):
    generator = torch.Generator().manual_seed(0)
    gradient, x = ((torch.randn(6, 40, generator=generator) * scale).to(dtype) for scale in (left, right))
    weight = nn.Parameter(torch.zeros(40, 40, dtype=dtype))
    ledger = Ledger()
    MeasuredLinear.apply(x, weight, None, partial(ledger.add, "weight")).backward(gradient)
    ledger.settle({"weight": weight})
    expected = np.linalg.norm(gradient.double().numpy().T @ x.double().numpy())
    assert float(ledger.norms["weight"]) == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [Base, Tied])
@pytest.mark.parametrize("factored", [True, False])
def test_a_non_finite_gradient_is_reported_as_one(value, kind, factored, monkeypatch):
    monkeypatch.setattr("propcheck.measure.weight_calls.worth_factoring", lambda *_: factored)

    def loss(logits):
        return (logits * torch.tensor(value)).sum()

    found = observed(build(kind), loss=loss)
    assert not any(np.isfinite(norm) for norm in found.values())


def test_a_gradient_of_zeros_is_zero_and_not_none():
    model = build(Base)
    nn.init.zeros_(model.second.weight)
    found = observed(model)
    assert (found["first.weight"], found["first.bias"]) == (0.0, 0.0)
    assert found["second.weight"] > 0


def test_a_gradient_that_is_formed_is_measured_as_it_is():
    """In bf16 the dense gradient is rounded; 10.0 must not be reported for 9.988 (fairscale#1092)."""
    model = build(Base).bfloat16()
    plain = copy.deepcopy(model)
    loss_of(plain(IDS)).backward()
    found = observed(model)
    assert found["first.bias"] == pytest.approx(float(plain.first.bias.grad.double().norm()), rel=1e-12)


def test_when_factoring_is_worth_it():
    # 256 tokens against the FFN of Qwen3.8-27B: 3 x 256 x (17408 + 5120) products against 17408 x 5120.
    weight = torch.empty(17408, 5120, device="meta")
    assert worth_factoring(torch.empty(1, 256, 5120, device="meta"), weight)
    assert not worth_factoring(torch.empty(8, 256, 5120, device="meta"), weight)
    assert not worth_factoring(torch.empty(5120, device="meta"), weight)


def test_weights_of_one_input_share_its_products(monkeypatch):
    from propcheck.measure import gradients

    class Shared(Base):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 96)

        def forward(self, ids):
            x = self.tokens(ids)
            return self.head(x + self.second(F.gelu(self.gate(x)) * self.first(x)))

    monkeypatch.setattr("propcheck.measure.weight_calls.worth_factoring", lambda *_: True)
    model = build(Shared)
    expected = dense(model)
    calls = []
    gram = gradients._gram
    monkeypatch.setattr(gradients, "_gram", lambda a, b: calls.append(a.shape) or gram(a, b))
    found = observed(model)
    assert calls.count((10, WIDTH)) == 3  # what first and gate read, what the head reads, the gradient of second's output
    assert found == pytest.approx(expected, rel=1e-6)
