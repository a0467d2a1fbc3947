"""While a scan runs, all that torch, numpy and Python call random is a function of the scan's seed."""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from propcheck.deferred_init.fake_patches import replaced
from propcheck.seeding import generator_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def seeded(*key: object) -> Iterator[None]:
    """Start the global generators from ``key``, and leave them as they were before.

    ``torch.seed`` takes a new seed from the machine; models that hash or route at random call it. It takes one from the
    generator here.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(replaced(torch, "seed", _seed))
        number = generator_for(*key).initial_seed()
        torch.manual_seed(number)
        stack.callback(random.setstate, random.getstate())
        random.seed(number)
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the global one is meant
        np.random.seed(number % 2**32)  # noqa: NPY002
        yield


def _seed() -> int:
    number = int(torch.randint(1 << 62, (), dtype=torch.int64))
    torch.manual_seed(number)
    return number
