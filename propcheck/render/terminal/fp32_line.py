"""What the summary says of the fp32 pass beside a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import number, percent

if TYPE_CHECKING:
    from propcheck.records import Run


def shadow_line(run: Run) -> str:
    """Say how far the run is from the same weights in fp32, the worst of several seeds; empty where no such pass was run."""
    last = max((record.site for record in run.sites), default=None)
    stream = _worst([(record.shadow_stream_error, record.site) for record in run.sites if record.site == last])
    update = _worst([(record.shadow_update_error, record.site) for record in run.sites])
    gradient = _worst(
        [
            (value, record.site)
            for record in run.sites
            for value in (record.shadow_grad_stream_error, record.shadow_grad_update_error)
        ]
    )
    parts = [
        None if stream is None else f"the stream differs by {_share(stream[0])} at the last site",
        None if update is None else f"updates by at most {_share(update[0])} (site {update[1]})",
        None if gradient is None else f"gradients by at most {_share(gradient[0])} (site {gradient[1]})",
    ]
    said = [part for part in parts if part is not None]
    return f"Beside fp32: {', '.join(said)}." if said else ""


def _worst(values: list[tuple[float | None, int]]) -> tuple[float, int] | None:
    """Return the largest value with its site; one that is no number is worse than any."""
    seen = [(value, site) for value, site in values if value is not None]
    return max(seen, key=lambda one: (math.isnan(one[0]), one[0]), default=None)


def _share(value: float) -> str:
    return percent(value) if math.isfinite(value) else number(value)
