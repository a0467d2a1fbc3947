"""Trainable parameters that no gradient reaches: PC304."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.formatting import count
from propcheck.records import Place
from propcheck.rules.dead import untrained
from propcheck.rules.module_groups import group_hit, group_subject, module_groups, parameters_of
from propcheck.rules.rule import Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run


def _no_gradient(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    trained = [p for p in run.parameters if p.kind == "parameter" and p.requires_grad and p.grad_state is not None]
    without = [p for p in trained if p.grad_state == "none"]
    if without and len(without) == len(trained):
        return [
            Hit(
                sites=(),
                place=Place(),
                metric="grad_state",
                value="none",
                expected="norm",
                message=f"No parameter has a path to the loss: none of the {count(len(trained), 'trainable parameter')} gets a "
                "gradient, so a step of training changes nothing.",
                severity="error",
                remedy="Look for what cuts the graph between the loss and everything before it: a no_grad or detach, or "
                "reentrant checkpointing over a frozen embedding (its input needs no gradient; use use_reentrant=False, or "
                "call requires_grad_() on the embedding's output).",
            )
        ]
    apart = idle_parameters(run) | untrained(run)
    hits = []
    for kind in module_groups(trained, {p.name for p in without if p.used is not False and p.name not in apart}):
        records = parameters_of(kind)
        used = ", used in the forward pass" if all(record.used for record in records) else ""
        are, have, at = ("is", "has", "it") if len(kind) == 1 else ("are", "have", "them")
        hits.append(
            group_hit(
                kind,
                metric="grad_state",
                value="none",
                expected="norm",
                message=f"{group_subject(kind)} {are} trainable{used} and {have} no path to the loss: no gradient arrives at "
                f"{at}, not even zero.",
            )
        )
    return hits


RULE = Rule(
    scope="run",
    id="PC304",
    name="no-gradient",
    severity="warning",
    threshold=0.0,
    unit="trainable parameters without a path to the loss; this rule always judges at 0; an error where none has one",
    sees="Trainable parameters that the backward pass does not reach.",
    why="The optimiser never changes them: what they compute stays as it was drawn. Where it is all of them, training does "
    "nothing while the loss is printed as ever.",
    formula="grad_state is none, requires_grad is true, and the forward pass used the parameter or that was not observed (else "
    "PC501 reports it). The highest module all of whose trainable parameters are so is reported, those of one name in several "
    "blocks together; where no trainable parameter has a path, one for the model. Experts that got no token in this batch are "
    "not meant, while a sibling has a gradient; nor are whole branches, which PC303 reports. A gradient that is exactly zero "
    "has a path and is no matter of this rule.",
    basis="No threshold: autograd either reaches a parameter or does not. A part is a warning only, because designs exist in "
    "which something else trains it (a bias of the router that is updated by hand, an index that has a loss of its own).",
    source="huggingface/transformers issue 21381 (frozen embedding and reentrant checkpointing: no path at all).",
    remedy="Look for a detach, a no_grad, an argmax or a cast to integers between it and the loss; if it is not to be trained, "
    "say requires_grad = False.",
    check=_no_gradient,
)
