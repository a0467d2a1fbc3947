"""How much memory this process has, had, and may take."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

# Kept free of the scan when the budget is "what the machine has".
_MARGIN = 1 << 30


def free_memory() -> int:
    """Return how large this process may grow: what it has plus what the machine has free, less a margin."""
    return max(_available() + resident_bytes() - _MARGIN, 1 << 30)


def _available() -> int:
    return _kilobytes("/proc/meminfo", "MemAvailable:") or 4 << 30  # not Linux: a size that every machine has


def resident_bytes() -> int:
    """Return this process's resident set now."""
    return _kilobytes("/proc/self/status", "VmRSS:") or peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Return the largest resident set that this process ever had."""
    # Linux hands ru_maxrss down from the parent process; VmHWM begins with the program.
    peak = _kilobytes("/proc/self/status", "VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _kilobytes(file: str, key: str) -> int | None:
    """Return the bytes that a line ``key 123 kB`` of a file under /proc says; None where there is none."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)
