"""The gate's tests run on the models of the faults, which stand in a folder of their own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
