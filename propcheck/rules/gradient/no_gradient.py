"""PC304: a trainable parameter has no path to the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.formatting import count
from propcheck.records import Place
from propcheck.rules.gradient.dead_gradient import reported_parameters
from propcheck.rules.module_groups import group_hit, group_subject, module_groups, parameters_of
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run
    from propcheck.rules.module_groups import ModuleGroup

RULE = Rule(
    scope="run",
    id="PC304",
    name="no-gradient",
    severity="warning",
    threshold=0.0,
    unit="trainable parameters without a path to the loss; this rule always judges at 0; an error if none has one",
    sees="Trainable parameters that the backward pass does not reach.",
    why="The optimiser never changes them: what they compute stays at its initial values. If that holds for all of them, "
    "training does nothing, while the loss is printed as usual.",
    formula="grad_state is none, requires_grad is true, and the forward pass used the parameter or its use was not observed "
    "(unused ones are PC501). The highest module all of whose trainable parameters are affected is reported, those of one name "
    "in several blocks together. If no trainable parameter has a path, there is one finding for the model. Experts that got no "
    "token in this batch do not count while a sibling has a gradient, nor do whole branches, which PC303 reports. A gradient "
    "that is exactly zero has a path and is not judged here.",
    basis="No threshold: autograd either reaches a parameter or does not. It is only a warning for a part of the model, "
    "because in some designs something else trains the part (a router bias that is updated by hand, an index with a loss of "
    "its own).",
    source="huggingface/transformers issue 21381 (frozen embedding and reentrant checkpointing: no path at all).",
    remedy="Look for a detach, a no_grad, an argmax or a cast to integers between the parameter and the loss. If it is not "
    "meant to be trained, set requires_grad = False.",
    example=Example(
        broken="gate = (self.gate(x) > 0).to(x.dtype)  # a comparison has no gradient",
        repaired="gate = torch.sigmoid(self.gate(x))",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Judge the trainable parameters that autograd does not reach."""
    trainable = [p for p in run.parameters if p.kind == "parameter" and p.requires_grad and p.grad_state is not None]
    without_path = [p for p in trainable if p.grad_state == "none"]
    if without_path and len(without_path) == len(trainable):
        return [_whole_model(len(trainable))]
    reported_elsewhere = idle_parameters(run) | reported_parameters(run)
    affected = {p.name for p in without_path if p.used is not False and p.name not in reported_elsewhere}
    return [_hit(group) for group in module_groups(trainable, affected)]


def _whole_model(trainable: int) -> Hit:
    return Hit(
        sites=(),
        place=Place(),
        metric="grad_state",
        value="none",
        expected="norm",
        message=f"No parameter has a path to the loss: none of the {count(trainable, 'trainable parameter')} gets a gradient, "
        "so a training step changes nothing.",
        severity="error",
        remedy="Look for what cuts the graph between the loss and everything before it: a no_grad or detach, or reentrant "
        "checkpointing over a frozen embedding (its input needs no gradient; use use_reentrant=False, or call requires_grad_() "
        "on the embedding's output).",
    )


def _hit(group: ModuleGroup) -> Hit:
    used = ", used in the forward pass" if all(p.used for p in parameters_of(group)) else ""
    are, have, them = ("is", "has", "it") if len(group) == 1 else ("are", "have", "them")
    return group_hit(
        group,
        metric="grad_state",
        value="none",
        expected="norm",
        message=f"{group_subject(group)} {are} trainable{used} and {have} no path to the loss. The optimiser never changes "
        f"{them}.",
    )
