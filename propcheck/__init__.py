"""propcheck tells, before training, whether a deep network's signals survive its depth."""

from __future__ import annotations

from propcheck.errors import PropcheckError

__version__ = "0.1.0"

__all__ = ["PropcheckError", "__version__"]
