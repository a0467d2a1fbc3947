"""Compare the theory columns with what was measured, over depth and width, for the reference decoder.

    python benchmarks/depth_width.py [--blocks 8 16 32 64 128] [--widths 128 256 512 1024] [--threads 2]

Scans pre-norm and post-norm decoders (SwiGLU, RMSNorm, rotary, 128 Zipf tokens, fp32, embedding of std 1) at two inits:
"scaled" has the residual projections / sqrt(2 blocks), and every product the size that it has in a model 4096 wide with std
0.02 (std 0.02 sqrt(4096 / width)); "plain" has one std for all, and the sizes of a model 768 wide. Prints the worst deviation
of each case and writes docs/depth-width.png, the widest model of each depth.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import propcheck
from propcheck.config.decoder import DecoderConfig
from propcheck.targets.decoder.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.records import SiteRecord

PLACEMENTS = ("pre", "post")
# Scheme, and the width at which std 0.02 gives products of the size that they have here.
INITS = {"scaled": ("gpt2", 4096), "plain": ("normal", 768)}
BLOCKS = (8, 16, 32, 64, 128)
WIDTHS = (128, 256, 512, 1024)
# What is promised: theory is at most this factor from the measurement, at every site that has a prediction.
TOLERANCE = {"sum_rms": 1.10, "grad_stream_norm": 1.25}
THEORY = {"sum_rms": "theory_sum_rms", "grad_stream_norm": "theory_grad_norm"}


def measured(
    placement: str, blocks: int, width: int, *, init: str = "scaled", ffn: str = "swiglu", threads: int | None = None
) -> Sequence[SiteRecord]:
    """Scan one decoder and return its sites."""
    scheme, like = INITS[init]
    config = DecoderConfig.model_validate(
        {
            "model": {
                "layers": blocks,
                "width": width,
                "vocabulary": 1024,
                "attention": {"heads": width // 64},
                "ffn": {"kind": ffn},
            },
            "residual": {"placement": placement},
            "init": {"scheme": scheme, "std": 0.02 * (like / width) ** 0.5, "embedding_std": 1.0},
        }
    )

    def build() -> Decoder:
        return Decoder(config)

    return propcheck.scan(build, precision="fp32", tokens=128, memory="2GiB", threads=threads).record.sites


def worst(sites: Sequence[SiteRecord], column: str) -> tuple[float, int]:
    """Return the largest factor between theory and measurement, either way, and its site."""
    factors = [(getattr(site, THEORY[column]) / getattr(site, column), site.site) for site in sites if _told(site, column)]
    return max((max(ratio, 1 / ratio), site) for ratio, site in factors)


def untold(sites: Sequence[SiteRecord], column: str) -> list[int]:
    """Return the sites without a prediction."""
    return [site.site for site in sites if not _told(site, column)]


def _told(site: SiteRecord, column: str) -> bool:
    return getattr(site, THEORY[column]) is not None


def draw(cases: Mapping[tuple[str, str, int], tuple[int, Sequence[SiteRecord]]], path: Path) -> None:
    """Draw the cases, each by init, placement and blocks, with its width."""
    figure = Figure(figsize=(15, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(INITS) * len(PLACEMENTS), sharex=True)
    for row, (column, title) in enumerate((("sum_rms", "RMS of the sum"), ("grad_stream_norm", "gradient of the stream"))):
        for place, (init, placement) in enumerate((init, placement) for init in INITS for placement in PLACEMENTS):
            one = axes[row][place]
            one.set_yscale("log")
            one.set_title(f"{placement}-norm, {init} init: {title}", fontsize=9)
            one.grid(visible=True, alpha=0.3)
            mine = [(key[2], *case) for key, case in sorted(cases.items()) if key[:2] == (init, placement)]
            for number, (blocks, width, sites) in enumerate(mine):
                # The sum behind each block, the gradient before it: between them lies the other sublayer's.
                seen = [site for site in sites if site.site % 2 == 1 - row]
                told = [site for site in seen if _told(site, column)]
                one.plot(
                    [(site.site + 1) / 2 for site in seen],
                    [getattr(site, column) for site in seen],
                    color=f"C{number}",
                    lw=2.5,
                    alpha=0.5,
                    label=f"{blocks} blocks, width {width}",
                )
                theory = [getattr(site, THEORY[column]) for site in told]
                one.plot([(site.site + 1) / 2 for site in told], theory, "--", color="black", lw=0.9)
            one.plot([], [], "--", color="black", lw=0.9, label="theory")
            one.set_xscale("log", base=2)
            if row:
                one.set_xlabel("depth in blocks")
    axes[1][0].legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "depth-width.png")
    options = parser.parse_args()
    widest: dict[tuple[str, str, int], tuple[int, Sequence[SiteRecord]]] = {}
    print("| init | placement | blocks | width | stream RMS | gradient | seconds |\n|---|---|---|---|---|---|---|")
    for width, blocks, init, placement in itertools.product(sorted(options.widths), options.blocks, INITS, PLACEMENTS):
        started = time.perf_counter()
        sites = measured(placement, blocks, width, init=init, threads=options.threads)
        cells = [f"x{factor:.3f} at site {site}" for factor, site in (worst(sites, column) for column in TOLERANCE)]
        seconds = time.perf_counter() - started
        print(f"| {init} | {placement} | {blocks} | {width} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)
        widest[init, placement, blocks] = (width, sites)
        draw(widest, options.picture)


if __name__ == "__main__":
    main()
