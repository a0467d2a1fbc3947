"""PC502: a model without any observed residual addition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.records import Place
from propcheck.rules.coverage.unobserved import summary
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

RULE = Rule(
    scope="run",
    id="PC502",
    name="no-residual-stream",
    severity="warning",
    threshold=0.0,
    unit="sites; this rule always judges at 0",
    sees="A model in which no residual addition was found.",
    why="Every rule on the stream is then silent, and a report without findings would look healthy although nothing was "
    "judged. A deep network without residual additions is also hard to train.",
    formula="The run has no site.",
    basis="No threshold is needed: there is a site, or there is none.",
    source="He 2015, arXiv 1512.03385 (plain deep networks degrade with depth, residual ones do not).",
    remedy="If the model has residual connections, check whether fused or compiled code computes them, which cannot be "
    "followed; scan its plain form instead. If it has none, only the rules on parameters apply.",
    example=Example(
        broken="x = block(x)  # block computes mlp(norm(x))",
        repaired="x = x + block(x)",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Report a run without sites."""
    if run.sites:
        return []
    skipped = f" Could not follow: {summary(run.unobserved)}." if run.unobserved else ""
    return [
        Hit(
            sites=(),
            place=Place(),
            metric="sites",
            value=0.0,
            expected="at least 1",
            message="No residual addition was found (expected at least 1): the forward pass never added the output of a branch "
            "to the stream that the branch read. The rules on stream and updates (PC2xx) and on their gradients (PC3xx) had "
            f"nothing to judge, so the absence of such findings means nothing.{skipped}",
        )
    ]
