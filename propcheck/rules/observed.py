"""What the scan could not see: PC502 and PC503."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import pattern
from propcheck.formatting import count
from propcheck.records import Place
from propcheck.rules.rule import Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

# Sentences that a message holds; all of them are in run.json.
_MOST = 5


def _no_stream(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    if run.sites:
        return []
    seen = f" What could not be followed: {_listed(run.unobserved)}." if run.unobserved else ""
    return [
        Hit(
            sites=(),
            place=Place(),
            metric="sites",
            value=0.0,
            expected="at least 1",
            message="No residual addition was found: nothing in the forward pass was seen to add what a branch computed to the "
            "stream that it read. The rules about stream and updates (PC2xx) and their gradients (PC3xx) had nothing to judge, "
            f"so their silence says nothing.{seen}",
        )
    ]


def _unobserved(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    if not run.unobserved:
        return []
    first = run.unobserved[0].partition(":")[0]
    return [
        Hit(
            sites=(),
            place=Place(module=first),
            metric="unobserved",
            value=float(len(run.unobserved)),
            expected=0.0,
            message=f"{count(len(run.unobserved), 'place')} could not be followed, so sites may be missing there: "
            f"{_listed(run.unobserved)}.",
        )
    ]


def _listed(sentences: Sequence[str]) -> str:
    """Write the sentences in a row, those that differ only in numbers of the path once."""
    kinds: dict[str, int] = {}
    firsts: dict[str, str] = {}
    for sentence in sentences:
        path, colon, rest = sentence.rstrip(".").partition(":")
        kind = pattern(path) + colon + rest
        kinds[kind] = kinds.get(kind, 0) + 1
        firsts.setdefault(kind, sentence.rstrip("."))
    texts = [firsts[kind] if amount == 1 else f"{kind} ({amount} of them)" for kind, amount in kinds.items()]
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more


NO_RESIDUAL_STREAM = Rule(
    scope="run",
    id="PC502",
    name="no-residual-stream",
    severity="warning",
    threshold=0.0,
    unit="sites; this rule always judges at 0",
    sees="A model in which no residual addition was found.",
    why="Every rule about the stream is silent then, and a report without findings would look healthy although nothing was "
    "judged. A deep network without residual additions is also hard to train.",
    formula="The run has no site.",
    basis="No threshold: there is a site, or there is none.",
    source="He 2015, arXiv 1512.03385 (plain deep networks degrade with depth, residual ones do not).",
    remedy="If the model has residual connections, look whether they are computed in fused or compiled code that cannot be "
    "followed, and scan its plain form. If it has none, only the rules about parameters apply.",
    check=_no_stream,
)

UNOBSERVED = Rule(
    scope="run",
    id="PC503",
    name="unobserved",
    severity="note",
    threshold=0.0,
    unit="places that could not be followed; this rule always judges at 0",
    sees="Places where tensors could not be followed.",
    why="Sites inside them are missing from the curves, and the rules judge what is left as if it were all.",
    formula="The scan lists each place by module path (`unobserved` in run.json); places that differ only in their number are "
    "one line.",
    basis="No threshold: what was not seen is said.",
    source="None: a limit of this tool.",
    remedy="Scan with the plain form of that module (no fused fast path, no compiled kernel); or read the curves knowing that "
    "these places are not in them.",
    check=_unobserved,
)

RULES = (NO_RESIDUAL_STREAM, UNOBSERVED)
