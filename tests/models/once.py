"""Each model is scanned once in each precision, however many tests look at the run."""

import functools
from collections.abc import Callable

import propcheck


def scanned_once(target: Callable[[str], propcheck.Target]) -> Callable[[str, str], propcheck.Run]:
    """Return what scans ``target(name)`` in a precision, or has done so."""

    @functools.cache
    def scan(name: str, precision: str) -> propcheck.Run:
        return propcheck.scan(lambda: target(name), precision=precision)

    return scan
