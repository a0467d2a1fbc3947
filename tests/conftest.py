"""The marker of tests that `make test-fast` leaves out."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Folders and modules that build many models, models at full depth, or many processes: most of the time of all tests.
SLOW = {
    "api/test_fronts_agree.py",
    "api/test_measurement.py",
    "api/test_sweep.py",
    "cli/test_compare_command.py",
    "cli/test_gate_command.py",
    "comparison/test_gate_faults.py",
    "comparison/test_harmless_changes.py",
    "comparison/test_other_draws.py",
    "comparison/test_repeated_gates.py",
    "execution/test_nonfinite.py",
    "execution/test_shadow.py",
    "execution/test_streamed_equals_resident.py",
    "execution/test_uncut.py",
    "faults",
    "healthy",
    "models",
    "render/test_overlay.py",
    "render/test_plots.py",
    "test_ci_examples.py",
    "test_contributing.py",
    "test_examples.py",
    "tracing/test_parallel.py",
    "tracing/test_streams.py",
    "validation",
}


def pytest_collection_modifyitems(items):
    for item in items:
        path = item.path.relative_to(HERE)
        if SLOW & {path.as_posix(), path.parts[0]}:
            item.add_marker(pytest.mark.slow)
