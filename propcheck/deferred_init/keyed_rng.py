"""Random fills whose values depend only on a key, never on threads, order or device.

A tensor is filled in chunks of 2^20 numbers, each from a generator of its own, seeded by hashing the call's key with
the chunk's index. Any number of threads may then share the chunks.

Normal numbers are drawn in fp32 and rounded to the tensor's dtype, as CUDA's ``normal_`` does, so that a bf16 model has the
weights of the fp32 one, rounded; older CPU kernels of torch made half-precision normals from a uniform variate of 8 bits.
Uniform numbers are drawn in the tensor's own dtype, as torch does everywhere: a bf16 ``uniform_(0, 16)`` gives exactly 0 for
1 of 512 numbers (those that would round to 16), a property of such code, and one that people lost attention heads to.

A generator of torch has seeds of 32 bits: among the 27,000 chunks of a model of 27 B, two equal ones are a matter of 1 in 12.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from propcheck.seeding import generator_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self

    from torch import Tensor

CHUNK = 1 << 20

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Threads that share the chunks of a tensor; torch's own kernels run single-threaded inside each.

    Parameters
    ----------
    threads
        How many; by default as many as torch uses.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or torch.get_num_threads()
        # Without this each worker would start a team of threads of its own for every small kernel.
        self._pool = ThreadPoolExecutor(self.threads, "propcheck", initializer=lambda: torch.set_num_threads(1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Apply ``function`` to each item, in any order; results in the order of the items."""
        return list(self._pool.map(function, items))


def fill_in_chunks(
    tensor: Tensor,
    draw: Callable[[Tensor, torch.Generator], object],
    key: tuple[object, ...],
    workers: Workers,
    *,
    through_fp32: bool,
) -> None:
    """Fill ``tensor`` in place with ``draw(chunk, generator)``.

    Parameters
    ----------
    tensor
        Any shape, CPU. A tensor that is not contiguous is filled through a contiguous copy.
    draw
        Fills a 1-d tensor in place from a generator.
    key
        What the values depend on, with the tensor's shape and dtype.
    through_fp32
        Draw half-precision values in fp32 and round them.
    """
    flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    buffered = through_fp32 and tensor.dtype in (torch.bfloat16, torch.float16)

    def fill(index: int) -> None:
        part = flat[index * CHUNK : (index + 1) * CHUNK]
        target = torch.empty(part.numel(), dtype=torch.float32, device="cpu") if buffered else part
        draw(target, generator_for(*key, index))
        if buffered:
            part.copy_(target)

    count = -(-flat.numel() // CHUNK)
    if count > 1:
        workers.map(fill, range(count))
    elif count:
        fill(0)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def truncated_normal_(  # noqa: PLR0913 - the arguments of nn.init.trunc_normal_
    chunk: Tensor, mean: float, std: float, low: float, high: float, generator: torch.Generator
) -> None:
    """Draw N(mean, std²) restricted to [low, high] in place, as ``nn.init.trunc_normal_`` distributes it."""
    if mean < low:  # mirrored: the distribution function is exact in its lower tail, and 1 - something in the upper
        truncated_normal_(chunk, -mean, std, -high, -low, generator)
        chunk.neg_()
        return
    below, above = (0.5 * math.erfc((mean - bound) / (std * math.sqrt(2))) for bound in (low, high))
    if above - below > 0.3:  # rejection is quick
        chunk.normal_(mean, std, generator=generator)
        while (outside := ((chunk < low) | (chunk > high))).any():
            again = torch.empty(int(outside.sum()), dtype=chunk.dtype, device="cpu")
            chunk[outside] = again.normal_(mean, std, generator=generator)
    else:  # the inverse distribution function, in fp64 for its tails
        uniform = torch.empty(chunk.shape, dtype=torch.float64, device="cpu").uniform_(below, above, generator=generator)
        chunk.copy_(torch.special.ndtri(uniform).mul_(std).add_(mean).clamp_(low, high))


def draw(  # noqa: PLR0913 - a call of an operator, and what its values depend on
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Tensor, key: tuple[object, ...], workers: Workers
) -> Any:
    """Run a random operator of torch with generators that depend on ``key`` alone.

    Parameters
    ----------
    function, args, kwargs
        The operator, and how to call it.
    memory
        What it writes; where it returns a new tensor, memory of that tensor's shape and dtype, which may be used for it.
    key
        What the values depend on, with shape and dtype.
    workers
        Threads for large fills.

    Returns
    -------
    Tensor or tuple of Tensor
        What the operator returns.
    """
    name = str(function._schema.name.split("::")[1])  # noqa: SLF001
    fill = _independent(name, function._overloadname, args, kwargs)  # noqa: SLF001
    if fill is not None and memory.is_floating_point():
        fill_in_chunks(memory, fill, key, workers, through_fp32="normal" in name or "randn" in name)
        return memory
    generator = generator_for(*key)
    if any(argument.name == "generator" for argument in function._schema.arguments):  # noqa: SLF001
        return function(*args, **{**kwargs, "generator": generator})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        return function(*args, **kwargs)


def _independent(
    name: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor, torch.Generator], object] | None:
    """Return how to draw one chunk of a call whose elements are independent and alike, None for other calls."""

    def value(position: int, keyword: str, default: float) -> float:
        return float(args[position]) if len(args) > position else float(kwargs.get(keyword, default))

    if name in ("rand", "rand_like"):
        return lambda chunk, generator: chunk.uniform_(generator=generator)
    if name in ("randn", "randn_like"):
        return lambda chunk, generator: chunk.normal_(generator=generator)
    if name == "uniform_":
        low, high = value(1, "from", 0.0), value(2, "to", 1.0)
        return lambda chunk, generator: chunk.uniform_(low, high, generator=generator)
    if name == "normal_" or (name, overload) == ("normal", "float_float"):
        first = 1 if name == "normal_" else 0
        mean, std = value(first, "mean", 0.0), value(first + 1, "std", 1.0)
        return lambda chunk, generator: chunk.normal_(mean, std, generator=generator)
    if name == "trunc_normal_":
        bounds = value(1, "mean", 0.0), value(2, "std", 1.0), value(3, "a", -2.0), value(4, "b", 2.0)
        return lambda chunk, generator: truncated_normal_(chunk, *bounds, generator)
    return None
