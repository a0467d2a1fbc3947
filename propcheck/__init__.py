"""propcheck tells, before training, whether a deep network's signals survive its depth."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.api.compare import Comparison, Gate, compare, gate
    from propcheck.api.scan import Run, scan
    from propcheck.targets.target import Target

__version__ = "0.1.0"

__all__ = ["Comparison", "Gate", "PropcheckError", "Run", "Target", "__version__", "compare", "gate", "scan"]

# Imported when they are first asked for: they need torch, and the command line's help must not wait for that.
_LATER = {
    "Comparison": "propcheck.api.compare",
    "Gate": "propcheck.api.compare",
    "Run": "propcheck.api.scan",
    "Target": "propcheck.targets.target",
    "compare": "propcheck.api.compare",
    "gate": "propcheck.api.compare",
    "scan": "propcheck.api.scan",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LATER]
