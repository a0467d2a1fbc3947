"""PC501: modules and parameters that the forward pass does not use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.formatting import count
from propcheck.rules.module_groups import group_hit, group_subject, module_groups, parameters_of
from propcheck.rules.rule import Example, Rule

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run
    from propcheck.rules.module_groups import ModuleGroup
    from propcheck.rules.rule import Hit

RULE = Rule(
    scope="run",
    id="PC501",
    name="unused-module",
    severity="warning",
    threshold=0.0,
    unit="parameters that no operation used; this rule always judges at 0",
    sees="Modules of which the forward pass used no parameter, and single unused parameters.",
    why="Something was created but never called, so a part of the model that was meant to work does not. It costs memory, and "
    "it stops distributed training, which expects a gradient for every parameter.",
    formula="used is false for every parameter of a module; a tied parameter counts in each of its places. The highest such "
    "module is reported. Modules of the same name in several blocks are one finding. Experts that got no token in this batch "
    "are skipped if another expert has a gradient. Buffers do not count.",
    basis="No threshold is needed: an operation used it, or none did.",
    source="lucidrains/x-transformers issue 352 (q/k scales created, never used); PyTorch's DistributedDataParallel "
    "(find_unused_parameters).",
    remedy="Call it, or do not create it. If these inputs do not need it (a branch for another modality, a layer skipped at "
    "random in this pass), no action is needed.",
    example=Example(
        broken="self.q_scale = nn.Parameter(torch.ones(head_width))\n...\nq = F.normalize(q, dim=-1)",
        repaired="q = F.normalize(q, dim=-1) * self.q_scale",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Group the unused parameters by module."""
    idle = idle_parameters(run)
    parameters = [p for p in run.parameters if p.kind == "parameter"]
    unused = {p.name for p in parameters if p.used is False and p.name not in idle}
    return [_hit(group) for group in module_groups(parameters, unused)]


def _hit(group: ModuleGroup) -> Hit:
    if "" in group:
        subject = "No parameter of the model was"
    else:
        subject = f"{group_subject(group)} {'was' if len(group) == 1 else 'were'} not"
    parameters = parameters_of(group)
    size = f"{count(len(parameters), 'parameter')}, {count(sum(p.numel for p in parameters), 'element')}"
    return group_hit(
        group,
        metric="used",
        value=float(len(parameters)),
        expected=0.0,
        message=f"{subject} used in the forward pass ({size}). This takes memory and has no effect, and training never changes "
        "it.",
    )
