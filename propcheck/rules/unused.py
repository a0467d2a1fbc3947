"""Modules that the forward pass does not use: PC501."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.formatting import count
from propcheck.rules.module_groups import group_hit, group_subject, module_groups, parameters_of
from propcheck.rules.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run
    from propcheck.rules.rule import Hit


def _unused_module(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    idle = idle_parameters(run)
    parameters = [p for p in run.parameters if p.kind == "parameter"]
    hits = []
    for kind in module_groups(parameters, {p.name for p in parameters if p.used is False and p.name not in idle}):
        what = f"{group_subject(kind)} {'was' if len(kind) == 1 else 'were'} not used in the forward pass"
        what = "No parameter of the model was used in the forward pass" if "" in kind else what
        records = parameters_of(kind)
        size = f"{count(len(records), 'parameter')}, {count(sum(record.numel for record in records), 'element')}"
        hits.append(
            group_hit(
                kind,
                metric="used",
                value=float(len(records)),
                expected=0.0,
                message=f"{what} ({size}): memory without effect, which training does not change.",
            )
        )
    return hits


UNUSED_MODULE = Rule(
    scope="run",
    id="PC501",
    name="unused-module",
    severity="warning",
    threshold=0.0,
    unit="parameters that no operation used; this rule always judges at 0",
    sees="Modules none of whose parameters the forward pass used, and single parameters likewise.",
    why="Something was created and not called: a part of the model that was meant to work does not. It costs memory, and "
    "stops distributed training where every parameter is expected to get a gradient.",
    formula="used is false for every parameter below a module, a tied one counting in each of its places. The highest such "
    "module is reported, modules of one name in several blocks together. Experts that got no token in this batch are left "
    "out, while a sibling has a gradient. Buffers do not count.",
    basis="No threshold: an operation used it, or none did.",
    source="lucidrains/x-transformers issue 352 (q/k scales created, never used); PyTorch's DistributedDataParallel "
    "(find_unused_parameters).",
    remedy="Call it, or do not create it. Nothing, if these inputs do not ask for it (a branch of another modality, a layer "
    "that was skipped at random in this pass).",
    check=_unused_module,
)

RULES = (UNUSED_MODULE,)
