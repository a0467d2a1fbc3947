"""Random fills whose values depend only on a key, never on threads, order or device.

A tensor is filled in chunks of 2^20 numbers, each from a generator of its own, seeded by hashing the call's key with
the chunk's index. Any number of threads may then share the chunks.

Normal numbers are drawn in fp32 and rounded to the tensor's dtype, as CUDA's ``normal_`` does; the CPU kernel of torch
draws half-precision normals from a uniform variate of 8 bits, which no accelerator would. Uniform numbers are drawn in the
tensor's own dtype, as torch does everywhere: that a bf16 ``uniform_(0, 16)`` rounds some values to exactly 0 is a
property of such code, and one that people lost attention heads to.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

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


def generator_for(*key: object) -> torch.Generator:
    """Return a CPU generator that depends on ``key`` alone (BLAKE2 over its text)."""
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)  # manual_seed takes a signed 64-bit number
    return generator


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
    flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
    buffered = through_fp32 and tensor.dtype in (torch.bfloat16, torch.float16)

    def fill(index: int) -> None:
        part = flat[index * CHUNK : (index + 1) * CHUNK]
        target = torch.empty(part.numel()) if buffered else part
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


def truncated_normal_(chunk: Tensor, mean: float, std: float, low: float, high: float, generator: torch.Generator) -> None:
    """Draw N(mean, std²) restricted to [low, high] in place, as ``nn.init.trunc_normal_`` distributes it."""
    below, above = (0.5 * (1 + math.erf((bound - mean) / (std * math.sqrt(2)))) for bound in (low, high))
    if above - below > 0.3:  # rejection is quick
        chunk.normal_(mean, std, generator=generator)
        while (outside := ((chunk < low) | (chunk > high))).any():
            chunk[outside] = torch.empty(int(outside.sum()), dtype=chunk.dtype).normal_(mean, std, generator=generator)
    else:  # the inverse distribution function, in fp64 for its tails
        uniform = torch.empty(chunk.shape, dtype=torch.float64).uniform_(below, above, generator=generator)
        chunk.copy_(torch.special.ndtri(uniform).mul_(std).add_(mean).clamp_(low, high))
