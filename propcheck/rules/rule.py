"""What a rule is, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck.records import Place, Run, Severity, SiteRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.analysis.profile import Profile

Relation = Literal["any", "same", "touching", "after", "before"]


@dataclass(frozen=True, slots=True)
class Hit:
    """One place, or one cause over several places, where a rule is broken.

    ``sites`` are all the sites it covers, ``place`` the worst or first of them. ``severity`` and ``remedy`` replace the rule's
    own where they are given.
    """

    sites: tuple[int, ...]
    place: Place
    metric: str
    value: float | str | None
    expected: float | str | None
    message: str
    severity: Severity | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: how it judges, and everything that ``propcheck rules ID`` tells of it.

    ``pool`` says what several seeds mean: "median" judges the median over seeds of each site, "any" every seed by itself.
    ``of`` says what is judged by itself: every stream of a model, or the run as a whole.
    A hit of a rule that ``follows`` names, which has the given relation to this one, is the cause of it: this one is then no
    finding of its own, but folded under that one. ``any``: wherever the cause is; ``same``: all sites of this hit are among
    the cause's; ``touching``: one is; ``after``: none lies before the cause's first, ``before``: none behind its last.
    A threshold that a user sets must be above ``least``: 1 where it is a factor, which at 1 everything is off by. A rule whose
    own threshold is 0 has none to set.
    """

    id: str
    name: str
    severity: Severity
    threshold: float
    unit: str
    sees: str
    why: str
    formula: str
    basis: str
    source: str
    remedy: str
    check: Callable[[Profile, Run, float], Sequence[Hit]]
    pool: Literal["median", "any"] = "median"
    of: Literal["stream", "run"] = "stream"
    follows: tuple[tuple[str, Relation], ...] = ()
    least: float = 0.0

    def explain(self) -> str:
        """Explain the rule in plain Markdown, without a final newline."""
        return "\n\n".join(
            [
                f"## {self.id} {self.name}",
                f"Default severity: {self.severity}. Default threshold: {self.threshold:g} ({self.unit}).",
                f"**What it sees.** {self.sees}",
                f"**Why it matters.** {self.why}",
                f"**How it judges.** {self.formula}",
                f"**How the threshold was chosen.** {self.basis}",
                f"**Source.** {self.source}",
                f"**What to do.** {self.remedy}",
            ]
        )


def place_of(record: SiteRecord) -> Place:
    """Name a site as a place."""
    return Place(site=record.site, block=record.block, sublayer=record.sublayer, module=record.module)


def in_words(record: SiteRecord) -> str:
    """Write ``site 7 (mlp of block 3)``."""
    where = record.sublayer if record.block is None else f"{record.sublayer} of block {record.block}"
    return f"site {record.site} ({where})"


def siblings(curve: Profile, index: int, *, skip_units: int = 0) -> tuple[list[int], list[int]]:
    """List the sites of the same kind and role before and after a site, nearest first, as indices into ``curve.sites``.

    The role is the site's position in its block, so that a decoder's self-attention and cross-attention are not compared.
    The sites of the first ``skip_units`` units are left out.
    """
    roles = [position for unit in curve.units for position in range(len(unit))]
    skipped = sum(len(unit) for unit in curve.units[:skip_units])
    alike = [
        i
        for i, record in enumerate(curve.sites)
        if i != index and i >= skipped and record.sublayer == curve.sites[index].sublayer and roles[i] == roles[index]
    ]
    return [i for i in alike if i < index][::-1], [i for i in alike if i > index]


def grouped(curve: Profile, flagged: Sequence[int]) -> list[list[SiteRecord]]:
    """Join flagged sites that stand side by side, or are neighbours among their siblings: they share a cause.

    ``flagged`` are indices into ``curve.sites``, and so are compared by their order there.
    """
    groups: list[set[int]] = []
    for index in sorted(flagged):
        before, _ = siblings(curve, index)
        linked = {index - 1, *before[:1]}
        touching = [group for group in groups if group & linked]
        groups = [group for group in groups if not group & linked] + [{index}.union(*touching)]
    return [[curve.sites[i] for i in sorted(group)] for group in groups]
