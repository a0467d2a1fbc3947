"""PC102: a parameter or buffer that no init call ever wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import count
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

RULE = Rule(
    scope="run",
    id="PC102",
    name="uninitialized-parameter",
    severity="error",
    threshold=0.0,
    unit="calls that wrote the values; this rule always judges at 0",
    sees="A parameter or buffer that no call ever wrote.",
    why="It holds whatever was in memory: zeros today, 1e38 or NaN on another machine. The usual cause is construction on the "
    "meta device followed by `to_empty`: everything that the constructor set (scalars, tables, per-layer scales) is lost, and "
    "the init function that runs afterwards does not set it again.",
    formula="init_calls is null and numel > 0. Allocating, viewing or copying unwritten memory does not count as writing. A "
    "buffer that the forward pass did not use is skipped: it may be a workspace. Blocks are grouped: one finding per name.",
    basis="No threshold is needed: a call wrote the tensor, or none did.",
    source="karpathy/nanochat issue 686 (scalars set in the constructor); allenai/OLMo-core issue 698 (a buffer of per-layer "
    "scales erased by to_empty).",
    remedy="Set it in the init function that runs after `to_empty`. Buffers need this too.",
    example=Example(
        broken='with torch.device("meta"):\n'
        "    model = Model()  # its constructor sets self.scale = nn.Parameter(torch.ones(width))\n"
        'model.to_empty(device="cuda")  # discards the ones\n'
        "model.init_weights()  # does not set scale",
        repaired="model.init_weights()  # now calls nn.init.ones_(self.scale)",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Report parameters and buffers without a value."""
    # A buffer that nothing read may be a workspace, written before it is read.
    unwritten = [p for p in run.parameters if p.init_calls is None and p.numel and not (p.kind == "buffer" and p.used is False)]
    return [
        Hit(
            sites=(),
            place=place(group[0]),
            metric="init_calls",
            value=None,
            expected="a call that writes it",
            message=f"{subject(group)} {verb(group, 'was', 'were')} never initialised: memory for "
            f"{count(sum(p.numel for p in group), 'element')} was allocated, but no call wrote to it. It holds whatever was "
            "there before, so everything computed from it is meaningless.",
        )
        for group in folded(unwritten)
    ]
