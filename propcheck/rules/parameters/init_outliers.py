"""PC105: values of a normally drawn weight that lie far outside the normal distribution."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import number
from propcheck.rules.parameters.drawn_weights import MIN_ELEMENTS, drawn_parameters, is_large_weight
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run

RULE = Rule(
    scope="run",
    id="PC105",
    name="init-outliers",
    severity="warning",
    threshold=2.0,
    least=1.0,
    unit="factor on sqrt(2 ln n), which n normal numbers reach",
    sees="Single values of a normally drawn weight that lie far outside the distribution.",
    why="The draw is broken. Typically a uniform number rounds to the end of its range, the inverse error function maps it to "
    "infinity, and a clamp moves it to the bound, which is 100 standard deviations away when std is 0.02. Such outliers then "
    "carry most of the weight's norm.",
    formula="absmax / RMS of the n nonzero elements > threshold x sqrt(2 ln n). Judged: weights of linear layers, convolutions "
    f"and embeddings with {MIN_ELEMENTS} elements or more, whose recorded init calls draw normal numbers once (normal_, "
    "trunc_normal_, or uniform_ followed by erfinv_) and then only scale, shift, clamp, cast or set to zero. Heavier tails, or "
    "parts drawn at different scales, may be intentional and are not judged.",
    basis="The chance that n normal numbers reach twice sqrt(2 ln n) is below n^-3: 1e-9. The reported fault reached 22 to 100 "
    "standard deviations, where 5 to 6 are expected.",
    source="pytorch/torchtitan issue 2269 (0.2 % of a bf16 truncated normal at the bound -2). The limit follows from the "
    "normal tail, P(|z| > t) < exp(-t^2 / 2).",
    remedy="Draw in fp32 and round afterwards, or truncate at a few standard deviations (a = -3 std, b = 3 std).",
    example=Example(
        broken="nn.init.trunc_normal_(weight_bf16, std=0.02)  # the default bounds, -2 and 2, are 100 std away",
        repaired="nn.init.trunc_normal_(weight_bf16, std=0.02, a=-0.06, b=0.06)",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Compare the largest value of normally drawn weights with the largest expected one."""
    ratios = {
        p.name: ratio
        for p in drawn_parameters(run)
        if is_large_weight(p) and _draws_normals(p.init_calls or "")
        if (ratio := _largest_ratio(p)) is not None and ratio > threshold * _expected_ratio(p)
    }
    return [_hit(group, ratios) for group in folded(p for p in run.parameters if p.name in ratios)]


def _hit(group: Sequence[ParameterRecord], ratios: Mapping[str, float]) -> Hit:
    worst = max(group, key=lambda p: ratios[p.name])
    ratio, expected = ratios[worst.name], _expected_ratio(worst)
    where = "" if len(group) == 1 else f" in {worst.name}"
    return Hit(
        sites=(),
        place=place(worst),
        metric="absmax / rms",
        value=ratio,
        expected=expected,
        message=f"{subject(group)} {verb(group, 'is', 'are')} drawn from a normal distribution ({worst.init_calls}), but the "
        f"largest value{where}, {number(worst.absmax)}, is {number(ratio)} times the RMS; the largest of {worst.numel} normal "
        f"numbers is about {number(expected)} times. A few broken values then dominate the weight, whose mean is "
        f"{number(worst.mean)}.",
    )


def _largest_ratio(record: ParameterRecord) -> float | None:
    """Divide the largest value by the RMS of the nonzero values (zeros are a padding row or a mask)."""
    nonzero = record.numel - (record.zeros or 0)
    if record.absmax is None or record.std is None or record.mean is None or not nonzero:
        return None
    rms = math.hypot(record.std, record.mean) * math.sqrt(record.numel / nonzero)
    return record.absmax / rms if rms else None


def _expected_ratio(record: ParameterRecord) -> float:
    return math.sqrt(2 * math.log(max(2, record.numel - (record.zeros or 0))))


# One recorded call: its name, and the numbers it got.
_CALL = re.compile(r"(?P<name>\w+)(?:\((?P<arguments>[^()]*)\))?(?: x \d+)?")
_NORMAL_DRAWS = frozenset({"normal_", "normal", "randn", "randn_like", "trunc_normal_"})
_UNIFORM_DRAWS = frozenset({"uniform_", "uniform", "rand", "rand_like"})
_SHAPE_PRESERVING = frozenset({"to", "clone", "copy_", "clamp_", "clamp", "zero_", "neg", "neg_"})
_ARITHMETIC = frozenset({"mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_"})


def _draws_normals(calls: str) -> bool:
    """Whether the calls draw normal numbers once, and then only rescale all of them or set some to zero."""
    parsed = [_CALL.fullmatch(call) for call in re.split(r", (?![^(]*\))", calls)]
    if not all(parsed):
        return False
    steps = [(call["name"], call["arguments"]) for call in parsed if call is not None]
    draws = [name for name, _ in steps if name in _NORMAL_DRAWS | _UNIFORM_DRAWS]
    inverted = sum(name in ("erfinv", "erfinv_") for name, _ in steps)
    if len(draws) != 1 or inverted != (draws[0] in _UNIFORM_DRAWS):
        return False
    return all(_keeps_normal(name, arguments) for name, arguments in steps if name not in (draws[0], "erfinv", "erfinv_"))


def _keeps_normal(name: str, arguments: str | None) -> bool:
    return (
        name in _SHAPE_PRESERVING
        or (name in _ARITHMETIC and bool(arguments))  # by a number; by a tensor it would change the distribution
        or (name in ("fill_", "masked_fill_") and arguments in ("0", "0.0"))
    )
