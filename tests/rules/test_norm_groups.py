"""The rules on norms, on any values."""

import dataclasses
import math
import random

import pytest
from synthetic import additive, norm, parameter, run_of

from propcheck.rules import judge

CONVOLUTION = {"role": "convolution", "block": 1, "site": 2, "shape": (10240, 1, 4), "fan_in": 4, "std": 0.02}


@pytest.mark.parametrize("seed", range(60))
def test_no_value_of_a_norm_breaks_a_rule(seed):
    draw = random.Random(seed)
    odd = [None, math.nan, math.inf, 0.0, 1e-300, 1e300, 1e-4]
    floats = ("eps", "input_rms", "output_rms", "gain", "epsilon_share", "zero_share")
    norms = [
        norm(
            n % 4,
            seed=n // 8,
            number=n,
            place=draw.choice(["read", "inside", "written", "stream", "outside"]),
            kind=draw.choice(["mean_square", "variance", "length"]),
            site=draw.choice([None, n % 8, 99]),
            parameter=draw.choice([None, "a.weight"]),
            **({"epsilon_share": 1.0} | {name: draw.choice(odd) for name in floats if draw.random() < 0.3}),
        )
        for n in range(16)
    ]
    records = [
        dataclasses.replace(r, bare_read=True, norm_output_rms=draw.choice(odd), stream_rms=draw.choice(odd))
        for r in additive(4)
    ]
    parameters = [parameter("blocks.1.linear_attn.conv1d.weight", **CONVOLUTION), parameter("a.weight")]
    for finding in judge(run_of(records, parameters, norms=norms), select=["PC106", "PC208"]):
        assert finding.message.endswith(".")
