"""Shared fixtures, and the markers of folders whose every test is slow."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Folders that build many models, or models at full depth: each test takes seconds.
SLOW = ("faults", "healthy", "models", "validation")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)
