"""Values that no parameter may start with: PC101 and PC102."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import count
from propcheck.rules.rule import Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run


def _nonfinite_parameter(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    hits = []
    # What was never written is PC102's, whatever lay there.
    for group in folded(p for p in run.parameters if p.nonfinite and p.init_calls is not None and not _meant(p)):
        bad = sum(p.nonfinite or 0 for p in group)
        calls = {p.init_calls for p in group}
        came = (
            f"; the calls that made {verb(group, 'it', 'them')}: {calls.pop()}" if len(calls) == 1 and None not in calls else ""
        )
        each = " In a vector each of them is one head or channel, which no gradient brings back."
        hits.append(
            Hit(
                sites=(),
                place=place(group[0]),
                metric="nonfinite",
                value=bad,
                expected=0.0,
                message=f"{subject(group)} {verb(group, 'holds', 'hold')} {count(bad, f'{_what(group)} element')} of "
                f"{sum(p.numel for p in group)}{came}."
                + (each if all(len(p.shape) == 1 and p.numel > 1 for p in group) else ""),
            )
        )
    return hits


def _has_nan(record: ParameterRecord) -> bool:
    return record.absmax is None or math.isnan(record.absmax)


def _what(group: Sequence[ParameterRecord]) -> str:
    """Say NaN, -inf or both; a mean tells the sign where no NaN is among the values."""
    if any(map(_has_nan, group)):
        return "NaN or infinite"
    return "-inf" if all(p.mean == -math.inf for p in group) else "infinite"


def _meant(record: ParameterRecord) -> bool:
    """Whether the infinities of something that is not trained are there on purpose: a mask, or a bound not yet set."""
    if _has_nan(record) or (record.kind == "parameter" and record.requires_grad):
        return False
    calls = record.init_calls or ""
    if re.search(r"\binf\b", calls) or (record.numel == 1 and calls.startswith("constant")):
        return True  # written as such
    zeros = record.zeros or 0
    among_zeros = zeros > 0 and zeros + (record.nonfinite or 0) == record.numel
    return record.mean == -math.inf and (among_zeros or len(record.shape) > 1)


def _uninitialized(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    # A buffer that nothing read may be a workspace, written before it is read.
    bad = [p for p in run.parameters if p.init_calls is None and p.numel and not (p.kind == "buffer" and p.used is False)]
    return [
        Hit(
            sites=(),
            place=place(group[0]),
            metric="init_calls",
            value=None,
            expected="a call that writes it",
            message=f"{subject(group)} {verb(group, 'was', 'were')} never written: memory was allocated "
            f"({sum(p.numel for p in group)} elements), no call gave it a value, and so {verb(group, 'it holds', 'they hold')} "
            "whatever lay there: what is computed with that means nothing.",
        )
        for group in folded(bad)
    ]


NONFINITE_PARAMETER = Rule(
    scope="run",
    id="PC101",
    name="non-finite-parameter",
    severity="error",
    threshold=0.0,
    unit="NaN or infinite elements; this rule always judges at 0",
    sees="NaN or infinity in a parameter or buffer, before anything has run.",
    why="Not all of them show in the activations: a decay of -inf makes its head forget everything, all sums stay finite, and "
    "since its gradient is zero or NaN training never repairs it.",
    formula="nonfinite > 0, and some call wrote it (else PC102). Infinities (not NaN) in what is not trained are silent where "
    "they are meant: written as such by a call (`fill_(-inf)`, `masked_fill_(-inf)`), a single number made from a literal (a "
    "bound that is yet to be set), or an additive mask (only -inf, in a table of two or more dimensions or among zeros). One "
    "finding a name, blocks together.",
    basis="Arithmetic: no number of them is acceptable in a weight.",
    source="huggingface/transformers issue 47831: uniform_(0, 16) in bf16 gives exactly 0 for 1 number of 512, its logarithm "
    "is -inf, and 6 of 2304 heads were dead for good.",
    remedy="Look at the calls named: the logarithm or the inverse of a draw that can be exactly 0, an exponential beyond the "
    "dtype's range. Draw in fp32, from an interval that leaves 0 out, and round at the end.",
    check=_nonfinite_parameter,
)

UNINITIALIZED = Rule(
    scope="run",
    id="PC102",
    name="uninitialized-parameter",
    severity="error",
    threshold=0.0,
    unit="calls that wrote the values; this rule always judges at 0",
    sees="A parameter or buffer that no call ever gave a value.",
    why="It holds what was in memory: zeros today, 1e38 or NaN on another machine. Typical after a construction on the meta "
    "device with `to_empty`: what the constructor set (scalars, tables, per-layer scales) is gone, and the init function that "
    "runs afterwards does not know of it.",
    formula="init_calls is null and numel > 0. Calls that only allocate, view or copy what was never written are no value. A "
    "buffer that the forward pass did not use is left out (a workspace). One finding a name, blocks together.",
    basis="No threshold: either a call wrote it, or none did.",
    source="karpathy/nanochat issue 686 (scalars set in the constructor), allenai/OLMo-core issue 698 (a buffer of per-layer "
    "scales, erased by to_empty).",
    remedy="Give it its value in the function that initialises the model (the one that runs after `to_empty`), buffers too.",
    check=_uninitialized,
)

RULES = (NONFINITE_PARAMETER, UNINITIALIZED)
