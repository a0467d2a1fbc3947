"""Fan-in and fan-out of a weight, from its shape."""

from __future__ import annotations

import math


def fans(shape: tuple[int, ...], role: str | None) -> tuple[int | None, int | None]:
    """Compute fan-in and fan-out as ``torch.nn.init`` does.

    Parameters
    ----------
    shape
        [out, in] of a linear layer, [out, in / groups, *taps] of a convolution, [rows, width] of an embedding.
    role
        How the forward pass uses it.

    Returns
    -------
    tuple of (int or None, int or None)
        Fan-in, shape[1] x taps, and fan-out, shape[0] x taps. An embedding has those of the head that it may be tied to: its
        width and its rows. None for every other role, below two dimensions, and for a stack of matrices ([experts, ...]), whose
        shape does not tell which dimension is summed over.
    """
    if len(shape) == 2 and role in ("linear", "embedding"):
        return shape[1], shape[0]
    if len(shape) >= 2 and role == "convolution":
        taps = math.prod(shape[2:])
        return shape[1] * taps, shape[0] * taps
    return None, None
