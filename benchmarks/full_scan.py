"""Time full-size scans against the floor of the machine that they run on.

    python benchmarks/full_scan.py [TARGET ...] [--tokens 256] [--memory 5GiB]

TARGET is what `propcheck scan` takes; default: qwen3.8-27b. The floor is what no streamed scan can do without: each parameter
drawn once, and for each token one product forward and one backward (input gradient) with every weight of blocks and head (of a
mixture of experts, with those that a token is sent to),

    parameters / fill rate  +  4 x block-and-head parameters x tokens / matrix rate,

with both rates measured beside the scan, on all cores: normal numbers into the parameters' dtype, before and after (the mean
counts), and products at the model's own shapes, after. Prints the rates, the floor, the scan's wall time, and their ratio; for
several targets, each in a process of its own, a table.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from propcheck.api import measurement
from propcheck.api.requests import ScanRequest
from propcheck.config.probe import load_probe
from propcheck.deferred_init.keyed_rng import Workers, fill_in_chunks

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


def fill_rate(dtype: torch.dtype, count: int = 1 << 27) -> float:
    """Return normal numbers a second on all cores."""
    tensor = torch.zeros(count, dtype=dtype)
    through_fp32 = dtype != torch.float32
    with Workers() as workers:
        return count / best_seconds(
            lambda: fill_in_chunks(
                tensor, lambda chunk, g: chunk.normal_(0, 0.02, generator=g), ("benchmark",), workers, through_fp32=through_fp32
            )
        )


def matrix_rate(shapes: dict[tuple[int, int], float], tokens: int, dtype: torch.dtype) -> float:
    """Return floating-point operations a second of forward and input-gradient products, over all weights of the model."""
    operations = seconds = 0.0
    for (out, into), weights in shapes.items():
        weight = torch.zeros(out, into, dtype=dtype)
        x, gradient = torch.zeros(tokens, into, dtype=dtype), torch.zeros(tokens, out, dtype=dtype)
        once = best_seconds(lambda x=x, w=weight: torch.nn.functional.linear(x, w))
        once += best_seconds(lambda g=gradient, w=weight: g.mm(w))
        seconds += weights * once
        operations += weights * 4 * tokens * out * into
    return operations / seconds


def product_shapes(parameters: Iterable[ParameterRecord], share: float) -> dict[tuple[int, int], float]:
    """Return how many weights of each shape a token meets; a stack of experts counts as the ``share`` that it is sent to."""
    weights: dict[tuple[int, int], float] = collections.defaultdict(float)
    for one in parameters:
        # A tied head is named after the embedding that it is tied to.
        if one.role == "linear" or " = " in one.name:
            if len(one.shape) == 2:
                weights[one.shape[0], one.shape[1]] += 1
            elif len(one.shape) == 3:
                weights[one.shape[1], one.shape[2]] += one.shape[0] * share
    return dict(weights)


def expert_share(target: str) -> float:
    """Return which part of its experts a token is sent to, from the target's config."""
    if not target.endswith(".json"):
        return 1.0
    config = json.loads(Path(target).read_text())
    return config.get("num_experts_per_tok", 1) / (config.get("num_local_experts") or config.get("n_routed_experts") or 1)


def measure(target: str, tokens: int, memory: str) -> None:
    """Measure one target and print it."""
    probe = load_probe(target, [f"inputs.tokens={tokens}", f"scan.memory={memory}"])
    before = fill_rate(torch.bfloat16)
    run = measurement.measure(ScanRequest(target, probe))
    dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
    if dtype == torch.float32:
        before = fill_rate(dtype)
    after = fill_rate(dtype)
    shapes = product_shapes(run.parameters, expert_share(target))
    fill, matrix = (before + after) / 2, matrix_rate(shapes, tokens, dtype)
    filling = run.model.parameters / fill
    multiplying = 4 * tokens * sum(number * out * into for (out, into), number in shapes.items()) / matrix
    floor = filling + multiplying
    print(f"fill rate    {fill / 1e9:.3f} G normal numbers/s (before {before / 1e9:.3f}, after {after / 1e9:.3f})")
    print(f"matrix rate  {matrix / 1e12:.3f} TFLOP/s in {run.precision}")
    print(f"floor        {filling:.1f} s to fill {run.model.parameters:,} + {multiplying:.1f} s to multiply = {floor:.1f} s")
    engine, peak = run.engine, run.engine.peak_rss_bytes / 2**30
    print(f"scan         {engine.wall_seconds:.1f} s, {engine.mode}, peak {peak:.2f} GiB")
    print(f"ratio        {engine.wall_seconds / floor:.2f}")
    name = Path(target).stem if target.endswith(".json") else target
    cells = [
        name, f"{run.model.parameters / 1e9:.2f}", run.precision, str(run.model.sites), engine.mode,
        f"{engine.wall_seconds:.0f}", f"{floor:.0f}", f"{engine.wall_seconds / floor:.2f}", f"{peak:.2f}",
    ]  # fmt: skip
    print("row | " + " | ".join(cells))


def main() -> None:
    """Measure one target here, or each of several in a process of its own."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("targets", nargs="*", default=["qwen3.8-27b"])
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--memory", default="5GiB")
    chosen = options.parse_args()
    if len(chosen.targets) == 1:
        measure(chosen.targets[0], chosen.tokens, chosen.memory)
        return
    print("| model | parameters, billions | precision | sites | mode | scan, s | floor, s | ratio | peak, GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for target in chosen.targets:
        command = [sys.executable, __file__, target, "--tokens", str(chosen.tokens), "--memory", chosen.memory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this very file
        rows = [line.removeprefix("row ") + " |" for line in done.stdout.splitlines() if line.startswith("row ")]
        print(rows[0] if rows else f"| {target} | {(done.stderr.strip().splitlines() or ['failed'])[-1]} |", flush=True)


if __name__ == "__main__":
    main()
