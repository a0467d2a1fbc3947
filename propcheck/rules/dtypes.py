"""Ranges, widths and roundoffs of floating-point dtypes, and the dtype of a sum: PC206, PC211 and PC212."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from propcheck.records import SiteRecord

# Largest finite number and smallest normal one, as torch.finfo gives them.
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": (2 - 2**-52) * 2.0**1023,
}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
# Half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def sum_dtype(site: SiteRecord) -> str | None:
    """Return the dtype of a site's sum, as torch promotes its operands; ``None`` if unknown."""
    stream, update = site.stream_dtype, site.update_dtype
    if stream not in BYTES or update not in BYTES:
        return None
    if stream != update and BYTES[stream] == BYTES[update]:
        return "float32"  # bf16 + fp16
    return max(stream, update, key=lambda dtype: BYTES[dtype])
