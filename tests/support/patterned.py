"""Random calls that draw the same known numbers in an ordinary construction and in a replayed one, so that the two compare."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from propcheck.deferred_init import materialize
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record


def numbers(shape) -> torch.Tensor:
    """Give numbers in (0, 1), all different, [shape], fp64: the fractional parts of multiples of the golden ratio."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1, dtype=torch.float64) * 0.6180339887498949).frac().view(shape)


def patterned(function, args, kwargs):
    """Do what the random operator ``function`` does, with ``numbers`` in place of random ones."""
    name = function._schema.name.split("::")[1]
    given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
    if name in ("normal_", "trunc_normal_"):
        return args[0].copy_(given.get("mean", 0.0) + given.get("std", 1.0) * 3 * (numbers(args[0].shape) - 0.5))
    if name == "uniform_":
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        return args[0].copy_(low + (high - low) * numbers(args[0].shape))
    if name == "exponential_":
        return args[0].copy_(-numbers(args[0].shape).log() / given.get("lambd", 1.0))
    if name == "bernoulli_":
        return args[0].copy_(numbers(args[0].shape) < given.get("p", 0.5))
    if name in ("rand", "randn"):
        return numbers(given["size"]).to(given.get("dtype") or torch.get_default_dtype())
    if name in ("rand_like", "randn_like"):
        return numbers(given["self"].shape).to(given["self"].dtype)
    if name == "normal" and function._overloadname == "float_float":
        value = given["mean"] + given["std"] * numbers(given["size"])
        return value.to(given.get("dtype") or torch.get_default_dtype())
    if name == "randperm":
        return torch.arange(given["n"] - 1, -1, -1)
    raise NotImplementedError(name)


class _Patterned(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            return patterned(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def patterned_torch():
    """Let torch's own random calls, ``nn.init.trunc_normal_`` included, draw ``numbers``."""

    def trunc_normal_(tensor, mean, std, a, b, generator=None):
        with torch.no_grad():
            return tensor.normal_(mean, std)

    with _Patterned(), mock.patch.object(nn.init, "_no_grad_trunc_normal_", trunc_normal_):
        yield


def assert_replays(factory, *, rtol=0.0):
    """Assert that each parameter and buffer that replay computes is the one that ``factory`` really makes.

    Returns the replay and the recording.
    """
    with patterned_torch():
        real = factory()
    expected = dict(real.named_parameters(remove_duplicate=False)) | dict(real.named_buffers(remove_duplicate=False))
    recording = record(factory)
    assert sorted(name for entry in recording.entries for name in entry.names) == sorted(expected)
    with Workers(1) as workers:
        replayed = Materializer(recording, workers)

        def draw(function, args, kwargs, memory, key, workers):
            return patterned(function, args, kwargs)

        with mock.patch.object(materialize, "draw", draw):
            for entry in recording.entries:
                want = expected[entry.name]
                assert all(expected[name] is want for name in entry.names)
                assert (entry.dtype, entry.shape) == (want.dtype, tuple(want.shape))
                assert entry.kind == ("parameter" if isinstance(want, nn.Parameter) else "buffer")
                assert entry.requires_grad == want.requires_grad
                for _ in range(2):  # computing a value must not change what the next one is made of
                    got = replayed.materialize(entry, 0)
                    torch.testing.assert_close(got, want.detach(), rtol=rtol, atol=0.0, msg=f"{entry.name}: {got} {want}")
                out = torch.empty(entry.shape, dtype=entry.dtype)
                got = replayed.materialize(entry, 0, out)
                assert got.data_ptr() == out.data_ptr()
                torch.testing.assert_close(got, want.detach(), rtol=rtol, atol=0.0)
    return replayed, recording
