"""``python -m propcheck`` is the same as ``propcheck``."""

from propcheck.cli.app import main

main()
