"""propcheck tells, before training, whether a deep network's signals survive its depth."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.api.compare import Comparison, compare
    from propcheck.api.gate import Gate, gate
    from propcheck.api.run import Run
    from propcheck.api.scan import scan
    from propcheck.api.sweep import Sweep, sweep
    from propcheck.targets.target import Target

__version__ = "0.1.0"

__all__ = ["Comparison", "Gate", "PropcheckError", "Run", "Sweep", "Target", "__version__", "compare", "gate", "scan", "sweep"]

# Imported on first use: they need pydantic or torch, and `propcheck --help` must not wait for those.
_LAZY = {
    "Comparison": "propcheck.api.compare",
    "Gate": "propcheck.api.gate",
    "Run": "propcheck.api.run",
    "Sweep": "propcheck.api.sweep",
    "Target": "propcheck.targets.target",
    "compare": "propcheck.api.compare",
    "gate": "propcheck.api.gate",
    "scan": "propcheck.api.scan",
    "sweep": "propcheck.api.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
