"""PC503: places where tensors could not be followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import pattern
from propcheck.formatting import count
from propcheck.records import Place
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

# Places named in a message; run.json lists all of them.
_MAX_LISTED = 5

RULE = Rule(
    scope="run",
    id="PC503",
    name="unobserved",
    severity="note",
    threshold=0.0,
    unit="places that could not be followed; this rule always judges at 0",
    sees="Places where tensors could not be followed.",
    why="The curves lack the sites inside them, and the rules judge the rest as if it were the whole model.",
    formula="The scan lists each place by module path (`unobserved` in run.json). Places that differ only in a number are "
    "listed once.",
    basis="No threshold is needed: every such place is reported.",
    source="None: this is a limit of propcheck.",
    remedy="Scan with the plain form of that module (no fused fast path, no compiled kernel), or read the curves knowing that "
    "these places are missing.",
    example=Example(
        broken='model = build(kernels="triton")',
        repaired='model = build(kernels="torch")  # for the scan',
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Report the places that the scan could not follow."""
    if not run.unobserved:
        return []
    return [
        Hit(
            sites=(),
            place=Place(module=run.unobserved[0].partition(":")[0]),
            metric="unobserved",
            value=float(len(run.unobserved)),
            expected=0.0,
            message=f"{count(len(run.unobserved), 'place')} could not be followed, so sites may be missing there: "
            f"{summary(run.unobserved)}.",
        )
    ]


def summary(unobserved: Sequence[str]) -> str:
    """List unobserved places in one sentence; those that differ only in a number of their path are listed once."""
    amounts: dict[str, int] = {}
    first: dict[str, str] = {}
    for line in unobserved:
        path, colon, reason = line.rstrip(".").partition(":")
        kind = pattern(path) + colon + reason
        amounts[kind] = amounts.get(kind, 0) + 1
        first.setdefault(kind, line.rstrip("."))
    texts = [first[kind] if amount == 1 else f"{kind} ({amount} of them)" for kind, amount in amounts.items()]
    more = f"; and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return "; ".join(texts[:_MAX_LISTED]) + more
