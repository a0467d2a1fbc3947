"""``python -m propcheck`` is the same as ``propcheck``."""

from propcheck.cli import main

main()
