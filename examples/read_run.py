"""Read a run directory with pandas: python examples/read_run.py reports/tiny"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd


def main(directory: Path) -> None:
    """Print four questions about a run and their answers."""
    sites = pd.read_parquet(directory / "sublayers.parquet")
    parameters = pd.read_parquet(directory / "parameters.parquet")

    print("How large are the updates of each kind of sublayer, compared with the stream?")
    print(sites.groupby("sublayer")[["update_rms", "update_ratio", "swallowed"]].median().to_string(), "\n")

    print("How does the stream grow? (after blocks 0, 1, 3, 7, ...)")
    after = sites.groupby("block")["sum_rms"].last()
    print(after[[block for block in after.index if (block + 1) & block == 0]].to_string(), "\n")

    print("Where does the gradient change most from one site to the next?")
    step = (sites["grad_stream_norm"] / sites["grad_sum_norm"]).sort_values(ascending=False)
    columns = ["block", "sublayer", "module", "grad_stream_norm", "grad_sum_norm"]
    print(sites.loc[step.index[:3], columns].to_string(index=False), "\n")

    print("Which parameters have the largest gradients, and how were they initialised?")
    columns = ["name", "shape", "init_calls", "std", "grad_norm"]
    print(parameters.nlargest(5, "grad_norm")[columns].to_string(index=False))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "reports/tiny"))
