"""Match the findings of two runs by rule and place."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.records import Finding

# From the strictest to the loosest. Which of many similar blocks a finding names is a matter of chance.
_KEYS: tuple[Callable[[Finding], object], ...] = (
    lambda finding: (finding.rule, finding.site and (finding.site.block, finding.site.sublayer, finding.site.parameter)),
    lambda finding: (finding.rule, finding.site and (finding.site.block, finding.site.sublayer)),
    lambda finding: (finding.rule, finding.site and finding.site.sublayer),
    lambda finding: finding.rule,
)


def new_and_gone(base: Sequence[Finding], other: Sequence[Finding]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings that only ``other`` has, and those that only ``base`` has.

    Findings match if rule and place agree; of the rest, those of the same rule and kind of sublayer; then those of the same
    rule.
    """
    gone, new = list(base), list(other)
    for key in _KEYS:
        free: dict[object, list[Finding]] = defaultdict(list)
        for finding in gone:
            free[key(finding)].append(finding)
        new = [finding for finding in new if not free[key(finding)] or not free[key(finding)].pop(0)]
        gone = [finding for findings in free.values() for finding in findings]
    return tuple(new), tuple(gone)
