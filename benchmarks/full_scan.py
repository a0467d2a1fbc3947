"""Time a full-size scan against the floor of the machine that it runs on.

    python benchmarks/full_scan.py [--probe qwen3.8-27b] [--tokens 256] [--memory 5GiB]

The floor is what no streamed scan can do without: each parameter drawn once, and for each token one product forward and one
backward (input gradient) with every weight of blocks and head,

    parameters / fill rate  +  4 x block-and-head parameters x tokens / matrix rate,

with both rates measured in this process, on all cores, before and after the scan (their means count): normal numbers into
bf16, and bf16 products at the model's own shapes. Prints the two rates, the floor, the scan's wall time, and their ratio.
"""

from __future__ import annotations

import argparse
import collections
import time
from typing import TYPE_CHECKING

import torch

from propcheck.build.random import Workers, fill_in_chunks
from propcheck.probe import load_probe
from propcheck.scanning import scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from propcheck.records import ParameterRecord


def best_seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Return the shortest of several timings, after one call to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def fill_rate(count: int = 1 << 27) -> float:
    """Return normal numbers a second, into bf16, on all cores."""
    tensor = torch.zeros(count, dtype=torch.bfloat16)
    with Workers() as workers:
        return count / best_seconds(
            lambda: fill_in_chunks(
                tensor, lambda chunk, g: chunk.normal_(0, 0.02, generator=g), ("benchmark",), workers, through_fp32=True
            )
        )


def matrix_rate(shapes: dict[tuple[int, int], int], tokens: int) -> float:
    """Return floating-point operations a second of forward and input-gradient products, over all weights of the model."""
    operations = seconds = 0.0
    for (out, into), weights in shapes.items():
        weight = torch.zeros(out, into, dtype=torch.bfloat16)
        x, gradient = torch.zeros(tokens, into, dtype=torch.bfloat16), torch.zeros(tokens, out, dtype=torch.bfloat16)
        once = best_seconds(lambda x=x, w=weight: torch.nn.functional.linear(x, w))
        once += best_seconds(lambda g=gradient, w=weight: g.mm(w))
        seconds += weights * once
        operations += weights * 4 * tokens * out * into
    return operations / seconds


def product_shapes(parameters: Iterable[ParameterRecord]) -> dict[tuple[int, int], int]:
    """Return how many weights of blocks and head have each shape."""
    weights = [p for p in parameters if p.role == "linear" and len(p.shape) == 2]
    return dict(collections.Counter((p.shape[0], p.shape[1]) for p in weights))


def main() -> None:
    """Measure, scan, measure again, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--probe", default="qwen3.8-27b")
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--memory", default="5GiB")
    chosen = options.parse_args()
    probe = load_probe(chosen.probe, [f"inputs.tokens={chosen.tokens}", f"scan.memory={chosen.memory}"])
    # The shapes come from a run of the same decoder with one period of its layers, which costs little.
    small = load_probe(chosen.probe, [f"model.layers={len(probe.model.mixers)}", "model.vocabulary=1024", "inputs.tokens=2"])
    period = product_shapes(p for p in scan(small, target=chosen.probe).parameters if p.block is not None)
    shapes = {shape: number * probe.model.layers // len(probe.model.mixers) for shape, number in period.items()}
    shapes[probe.model.vocabulary, probe.model.width] = shapes.get((probe.model.vocabulary, probe.model.width), 0) + 1

    rates = [(fill_rate(), matrix_rate(shapes, chosen.tokens))]
    run = scan(probe, target=chosen.probe)
    rates.append((fill_rate(), matrix_rate(shapes, chosen.tokens)))
    fill, matrix = (sum(rate) / len(rates) for rate in zip(*rates, strict=True))

    products = sum(number * out * into for (out, into), number in shapes.items())
    filling = run.model.parameters / fill
    multiplying = 4 * products * chosen.tokens / matrix
    floor = filling + multiplying
    parts = [
        ("fill rate", fill, 1e9, "G normal numbers/s", [rate for rate, _ in rates]),
        ("matrix rate", matrix, 1e12, "TFLOP/s in bf16", [rate for _, rate in rates]),
    ]
    for name, mean, unit, what, (before, after) in parts:
        print(f"{name:<12} {mean / unit:.3f} {what} (before {before / unit:.3f}, after {after / unit:.3f})")
    print(f"floor        {filling:.1f} s to fill {run.model.parameters:,} + {multiplying:.1f} s to multiply = {floor:.1f} s")
    engine = run.engine
    print(f"scan         {engine.wall_seconds:.1f} s, {engine.mode}, peak {engine.peak_rss_bytes / 2**30:.2f} GiB")
    print(f"ratio        {engine.wall_seconds / floor:.2f}")


if __name__ == "__main__":
    main()
