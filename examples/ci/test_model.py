"""How to gate a model in a test suite: python -m pytest examples/ci/test_model.py"""

from __future__ import annotations

from pathlib import Path

from propcheck.testing import assert_healthy

HERE = Path(__file__).parent


def test_the_model_is_as_its_baseline_was() -> None:
    # PROPCHECK_UPDATE_BASELINE=1 in the environment writes the baseline instead.
    assert_healthy(HERE / "model.toml", baseline=HERE / "baselines" / "model.parquet")


def test_a_deeper_model_has_no_errors_and_keeps_its_gradient() -> None:
    run = assert_healthy(
        f"{HERE.parent / 'nanogpt.py'}:build",
        args={"layers": 24, "width": 32, "heads": 2, "vocabulary": 256, "positions": 64},
        tokens=32,
    )
    stream = run.sublayers.grad_stream_norm
    assert stream.max() / stream.min() < 2
