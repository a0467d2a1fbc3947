"""PC101: NaN or infinity in a parameter or buffer at initialisation."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import count
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run

RULE = Rule(
    scope="run",
    id="PC101",
    name="non-finite-parameter",
    severity="error",
    threshold=0.0,
    unit="NaN or infinite elements; this rule always judges at 0",
    sees="NaN or infinity in a parameter or buffer at initialisation, before the forward pass.",
    why="The activations do not always show it. A decay of -inf makes its head forget everything while all sums stay finite. "
    "Its gradient is zero or NaN, so training never repairs it.",
    formula="nonfinite > 0, and an init call wrote the values (otherwise PC102 reports them). Infinities in tensors that are "
    "not trained are accepted if they look intentional: a call wrote them explicitly (`fill_(-inf)`, `masked_fill_(-inf)`), "
    "the tensor is a single number made from a literal (a bound to be set later), or it is an additive mask (only -inf, in a "
    "tensor of two or more dimensions or mixed with zeros). NaN is never accepted. Blocks are grouped: one finding per name.",
    basis="No threshold is needed: a weight must have no such element.",
    source="huggingface/transformers issue 47831: uniform_(0, 16) in bf16 returns exactly 0 for 1 of 512 numbers; its "
    "logarithm is -inf, and 6 of 2304 heads were dead for good.",
    remedy="Check the init code for the logarithm or inverse of a draw that can be exactly 0, or for an exponential that "
    "overflows the dtype. Draw in fp32 from an interval that excludes 0, and round last.",
    example=Example(
        broken="A_log = nn.Parameter(torch.empty(heads, dtype=torch.bfloat16).uniform_(0, 16).log_())  # log(0) = -inf",
        repaired="A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log_().to(torch.bfloat16))",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Report NaN and unintended infinities."""
    broken = [p for p in run.parameters if p.nonfinite and p.init_calls is not None and not _is_intentional(p)]
    return [_hit(group) for group in folded(broken)]


def _hit(group: Sequence[ParameterRecord]) -> Hit:
    nonfinite = sum(p.nonfinite or 0 for p in group)
    elements = sum(p.numel for p in group)
    calls = {p.init_calls for p in group}
    made_by = f", made by {next(iter(calls))}" if len(calls) == 1 else ""
    vectors = all(len(p.shape) == 1 and p.numel > 1 for p in group)
    consequence = (
        "Each is one head or channel, and no gradient repairs it." if vectors else "They spread to all that uses them."
    )
    return Hit(
        sites=(),
        place=place(group[0]),
        metric="nonfinite",
        value=nonfinite,
        expected=0.0,
        message=f"{subject(group)} {verb(group, 'contains', 'contain')} {count(nonfinite, f'{_value_kind(group)} element')} of "
        f"{elements} (expected 0){made_by}. {consequence}",
    )


def _has_nan(record: ParameterRecord) -> bool:
    return record.absmax is None or math.isnan(record.absmax)


def _value_kind(group: Sequence[ParameterRecord]) -> str:
    """Name the values: the mean gives the sign of the infinities where there is no NaN."""
    if any(map(_has_nan, group)):
        return "NaN or infinite"
    return "-inf" if all(p.mean == -math.inf for p in group) else "infinite"


def _is_intentional(record: ParameterRecord) -> bool:
    """Whether infinities in an untrained tensor are a mask, or a bound to be set later."""
    if _has_nan(record) or (record.kind == "parameter" and record.requires_grad):
        return False
    calls = record.init_calls or ""
    if re.search(r"\binf\b", calls) or (record.numel == 1 and calls.startswith("constant")):
        return True
    zeros = record.zeros or 0
    among_zeros = zeros > 0 and zeros + (record.nonfinite or 0) == record.numel
    return record.mean == -math.inf and (among_zeros or len(record.shape) > 1)
