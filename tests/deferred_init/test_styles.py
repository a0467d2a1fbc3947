"""Code of many styles replays to what the same constructor makes when it is run for real."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from patterned import assert_replays
from torch import nn
from torch.nn.utils import parametrizations


class Holder(nn.Module):
    """Registers what it is given under the same names."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def parameters(**tensors):
    return Holder(**{name: nn.Parameter(tensor) for name, tensor in tensors.items()})


def with_default_dtype(dtype, factory):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return factory()
    finally:
        torch.set_default_dtype(before)


# --- constants and tables


def literals():
    doubled = torch.tensor([1.0, 2.0])
    doubled.mul_(2)
    return parameters(a=torch.tensor([1.0, 2.0]), b=doubled, c=torch.tensor(3.0), d=torch.Tensor([1, 2]), e=torch.ones(2) * 0.3)


def numpy_arrays():
    array = np.linspace(0, 1, 6)
    module = parameters(a=torch.from_numpy(array), b=torch.tensor(array, dtype=torch.float32), c=torch.as_tensor(array).clone())
    array = np.empty(3, dtype=np.float32)
    for value in (1, 2):  # one array filled anew for each
        array[:] = value
        module.register_buffer(f"filled{value}", torch.from_numpy(array).clone())
    return module


def numpy_random_numbers():
    np.random.seed(3)  # noqa: NPY002
    return parameters(a=torch.tensor(np.random.randn(5)))  # noqa: NPY002


OUTSIDE = torch.arange(4.0)


def tensors_from_outside():
    module = parameters(a=OUTSIDE.clone().mul_(2), b=OUTSIDE[1:] + 1)
    module.register_buffer("c", OUTSIDE)
    module.register_parameter("d", nn.Parameter(OUTSIDE))
    module.e = nn.Parameter(torch.empty(4))
    with torch.no_grad():
        module.e.copy_(OUTSIDE)
    return module


def rotary_tables():
    inverse = 1.0 / (10000.0 ** (torch.arange(0, 8, 2) / 8))
    angles = torch.outer(torch.arange(5), inverse)
    module = Holder(cos=angles.cos(), sin=torch.cat((angles, angles), -1).sin(), complex=torch.polar(torch.ones(5, 4), angles))
    module.register_buffer("inverse", inverse, persistent=False)
    module.register_buffer("conjugate", module.complex.conj(), persistent=False)
    return module


def masks():
    mask = torch.full((4, 4), float("-inf")).triu(1)
    return Holder(
        mask=mask, tril=torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4), causal=torch.ones(3, 3, dtype=torch.bool).tril()
    )


def relative_positions():  # as in Swin
    coords = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += 1
    relative[:, :, 1] += 2
    relative[:, :, 0] *= 5
    return Holder(index=relative.sum(-1))


def s4d_real():  # as in Mamba
    a = torch.arange(1, 5, dtype=torch.float32)[None, :].expand(3, -1).contiguous()
    return parameters(a_log=torch.log(a), d=torch.ones(3))


def dt_bias():  # as in Mamba
    dt = torch.exp(torch.rand(6) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
    return parameters(dt_bias=dt + torch.log(-torch.expm1(-dt)))


# --- initialisers


def initialisers():
    module = parameters(
        eye=torch.empty(4, 5), dirac=torch.empty(3, 2, 3), xavier=torch.empty(4, 5), xavier_normal=torch.empty(4, 5),
        kaiming=torch.empty(4, 5), kaiming_normal=torch.empty(4, 5), constant=torch.empty(3), sparse=torch.empty(6, 4),
        trunc=torch.empty(20), orthogonal=torch.empty(4, 4), wide=torch.empty(2, 3, 3),
    )  # fmt: skip
    nn.init.eye_(module.eye)
    nn.init.dirac_(module.dirac)
    nn.init.xavier_uniform_(module.xavier, gain=2.0)
    nn.init.xavier_normal_(module.xavier_normal)
    nn.init.kaiming_uniform_(module.kaiming, a=math.sqrt(5))
    nn.init.kaiming_normal_(module.kaiming_normal, mode="fan_out", nonlinearity="relu")
    nn.init.constant_(module.constant, 0.7)
    nn.init.sparse_(module.sparse, 0.3, std=0.5)
    nn.init.trunc_normal_(module.trunc, std=0.02)
    nn.init.orthogonal_(module.orthogonal, gain=3.0)
    nn.init.orthogonal_(module.wide)
    return module


def timm_trunc_normal():  # the inverse error function, by hand
    weight = torch.empty(50)
    with torch.no_grad():
        weight.uniform_(-0.9, 0.9).erfinv_().mul_(0.02 * math.sqrt(2)).add_(0.0).clamp_(-2, 2)
    return parameters(a=weight)


def functional_draws():
    return parameters(
        a=torch.randn(3, 4) * 0.02,
        b=torch.rand(5) / 2,
        c=torch.normal(1.0, 0.1, (3, 2)),
        d=torch.randn_like(torch.zeros(3)) + 1,
        e=torch.rand_like(torch.zeros(3)).log(),
        f=torch.randn(4, dtype=torch.bfloat16),
    )


def with_a_generator():
    generator = torch.Generator().manual_seed(1)
    return parameters(a=torch.empty(4).normal_(generator=generator), b=torch.randn(3, generator=generator))


def legacy_constructors():
    return parameters(a=torch.FloatTensor(3, 2).uniform_(-1, 1), b=torch.Tensor(4).fill_(2))


# --- writing


def index_assignment():
    weight = torch.zeros(4, 6)
    weight[1] = 3
    weight[:, 2] = torch.arange(4.0)
    weight[[0, 2], 4] = 7
    weight[weight > 6] = 8
    weight[3, ...].mul_(2)
    embedding = nn.Embedding(5, 3, padding_idx=2)
    partly = torch.ones(3, 3)
    partly.fill_diagonal_(5)
    partly[0:2] += torch.randn(2, 3)
    return nn.ModuleList([parameters(weight=weight, partly=partly), embedding])


def data_arithmetic():
    linear = nn.Linear(4, 3)
    linear.weight.data = linear.weight.data * 0.5 + 1
    linear.weight.data /= 3.0
    linear.bias.data.sub_(linear.weight.data.mean())
    linear.weight.data.copy_(linear.weight.data)  # reads what it overwrites
    return linear


def data_of_another_shape():
    module = parameters(a=torch.arange(6.0), b=torch.arange(6.0).view(2, 3), c=torch.arange(4.0))
    module.a.data = module.a.data[:3]
    module.b.data = module.b.data.t()
    module.b.data.mul_(2)
    module.c.data = module.c.data[1:]
    return module


def in_place_views():
    turned = torch.arange(6.0).view(2, 3)
    as_it_was = turned.detach()
    turned.t_()
    squeezed = torch.arange(3.0).unsqueeze_(0)
    return parameters(turned=turned, as_it_was=as_it_was, squeezed=squeezed)


def bits_of_another_dtype():
    return parameters(a=torch.tensor([1065353216, 0], dtype=torch.int32).view(torch.float32))  # 1.0 in IEEE 754


def overwritten_factories():
    kinds = (
        torch.eye(3),
        torch.arange(2.0, 11.0).view(3, 3),
        torch.linspace(0, 1, 9).view(3, 3),
        torch.randn_like(torch.ones(3, 3)),
    )
    source = torch.arange(9.0).view(3, 3)
    tensors = {f"a{index}": kind.copy_(source) for index, kind in enumerate(kinds)}
    return parameters(**tensors, eye=torch.eye(3, out=torch.randn(3, 3)), scalar=torch.scalar_tensor(3.0).fill_(4))


def with_out():
    total = torch.empty(3)
    torch.add(torch.ones(3), torch.arange(3.0), out=total)
    torch.mul(total, 2, out=total)
    fresh = torch.empty(0)
    torch.cat((total, total), out=fresh)
    return parameters(a=total, b=fresh)


def foreach():
    module = parameters(a=torch.ones(3), b=torch.arange(4.0))
    with torch.no_grad():
        torch._foreach_mul_(list(module.parameters()), 0.5)
    return module


def drop_rates():  # as in many vision models
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)] + (torch.arange(4) / 4).tolist()
    assert rates[2] == pytest.approx(0.1)
    mask = torch.arange(6) % 2 == 0
    indices = mask.nonzero().flatten()
    module = parameters(
        scale=torch.full((2,), rates[2]), picked=torch.arange(6.0)[mask], rows=torch.ones(len(indices), rates.index(0.5))
    )
    if torch.equal(indices, torch.tensor([0, 2, 4])):
        module.register_buffer("indices", indices)
    return module


def state_dict():
    linear = nn.Linear(3, 2)
    linear.load_state_dict({"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)})
    other = nn.Linear(3, 2)
    other.load_state_dict(linear.state_dict())
    third = nn.Linear(3, 2)
    third.load_state_dict(linear.state_dict(), assign=True)
    return nn.ModuleList([linear, other, third])


# --- dtypes and devices


def later_dtype():
    parts = [
        nn.Linear(3, 2).half(),
        nn.Linear(3, 2).bfloat16(),
        nn.Linear(3, 2).to(torch.float64),
        nn.BatchNorm1d(3).bfloat16(),
    ]
    mixed = nn.Linear(3, 2).bfloat16()
    mixed.weight.data = mixed.weight.data.float()
    return nn.ModuleList([*parts, mixed])


def changed_default_dtype():
    def build():
        table = 1.0 / (100.0 ** (torch.arange(0, 6, 2) / 6))
        return nn.ModuleList(
            [nn.Linear(3, 2), Holder(table=table, halves=torch.arange(3) * 0.5, power=torch.tensor(2.0) ** torch.arange(3))]
        )

    return nn.ModuleList([with_default_dtype(torch.bfloat16, build), with_default_dtype(torch.float64, build), nn.Linear(2, 2)])


def skip_init():
    linear = nn.utils.skip_init(nn.Linear, 4, 3)
    nn.init.ones_(linear.weight)
    nn.init.normal_(linear.bias)
    return linear


def meta_then_empty():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    module.to_empty(device="cpu")
    for part in module:
        part.reset_parameters()
    return module


def meta_tied():  # moving from meta unties, as it does in torch
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
    module.to_empty(device="cpu")
    for index, parameter in enumerate(module.parameters()):
        parameter.data.fill_(index)
    return module


# --- sharing


def tied():
    module = nn.ModuleDict(
        {"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7, False), "other": nn.Linear(4, 7, bias=False)}
    )
    module.head.weight = module.embedding.weight
    module.other.weight.data = module.embedding.weight.data
    nn.init.normal_(module.embedding.weight, std=0.02)
    return module.bfloat16()


def tied_buffer():
    shared = torch.arange(3.0)
    first, second = Holder(table=shared), Holder(table=shared)
    shared.mul_(2)
    return nn.ModuleList([first, second])


def views_of_one_tensor():
    whole = torch.empty(3, 4, 5)
    for part in whole:
        nn.init.xavier_uniform_(part)
    whole[1].zero_()
    query, key, value = whole.unbind()
    left, right = torch.randn(4, 6).chunk(2, dim=1)
    return parameters(query=query, key=key, value=value, transposed=whole[2].t(), left=left, right=right)


def fused_then_split():
    fused = nn.Linear(4, 12)
    parts = [nn.Linear(4, 4) for _ in range(3)]
    for part, weight, bias in zip(parts, fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
        part.weight = nn.Parameter(weight.detach().clone())
        part.bias.data.copy_(bias)
    return nn.ModuleList([*parts, fused])


def from_another_parameter():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        second.weight.copy_(torch.linalg.inv(first.weight + 3 * torch.eye(4)))
        second.bias.copy_(F.normalize(first.bias, dim=0))
    return nn.ModuleList([first, second, copy.deepcopy(first)])


def looked_up_by_pointer():  # code that finds shared parameters by address
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    seen = {parameter.data_ptr() for parameter in (part.weight for part in module)}
    return nn.ModuleList([module, parameters(count=torch.zeros(len(seen)))])


def parameter_list():
    module = nn.Module()
    module.scales = nn.ParameterList([nn.Parameter(torch.full((2,), float(index))) for index in range(3)])
    module.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(2)), "b": torch.ones(3)})
    return module


# --- modules of torch


def torch_modules():
    return nn.ModuleList([
        nn.MultiheadAttention(8, 2),
        nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2),
        nn.GRU(4, 3),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.ConvTranspose1d(2, 3, 2),
        nn.Bilinear(2, 3, 4),
        nn.EmbeddingBag(5, 3),
        nn.BatchNorm2d(3),
        nn.PReLU(2),
    ]).half()  # fmt: skip


def parametrised():
    return nn.ModuleList([
        parametrizations.weight_norm(nn.Linear(4, 3)),
        parametrizations.spectral_norm(nn.Linear(4, 3)),
    ])  # fmt: skip


def nanogpt():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln = nn.LayerNorm(8)
            self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.register_buffer("bias", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.h = nn.Embedding(11, 8), nn.ModuleList([Block() for _ in range(3)])
            self.lm_head = nn.Linear(8, 11, bias=False)
            self.wte.weight = self.lm_head.weight
            self.apply(self._init_weights)
            for name, parameter in self.named_parameters():
                if name.endswith("c_proj.weight"):
                    torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * 3))

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    return GPT()


STYLES = [
    literals, numpy_arrays, numpy_random_numbers, tensors_from_outside, rotary_tables, masks, relative_positions, s4d_real,
    dt_bias, initialisers, timm_trunc_normal, functional_draws, with_a_generator, legacy_constructors, index_assignment,
    drop_rates, data_arithmetic, data_of_another_shape, in_place_views, bits_of_another_dtype, overwritten_factories,
    with_out, foreach, state_dict, later_dtype, changed_default_dtype, skip_init, meta_then_empty, meta_tied, tied,
    tied_buffer, views_of_one_tensor, fused_then_split, from_another_parameter, looked_up_by_pointer, parameter_list,
    torch_modules, parametrised, nanogpt,
]  # fmt: skip


@pytest.mark.parametrize("factory", STYLES, ids=lambda factory: factory.__name__)
def test_replays_what_the_constructor_makes(factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_replays(factory)
