"""Parameters that training would not change: PC304 and PC501."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.analysis.name_patterns import path, pattern, subject
from propcheck.formatting import count, places
from propcheck.records import Place
from propcheck.rules.dead import untrained
from propcheck.rules.rule import Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run


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
    for kind in _kinds(trained, {p.name for p in without if p.used is not False and p.name not in apart}):
        records = _records(kind)
        used = ", used in the forward pass" if all(record.used for record in records) else ""
        are, have, at = ("is", "has", "it") if len(kind) == 1 else ("are", "have", "them")
        hits.append(
            _hit(
                kind,
                metric="grad_state",
                value="none",
                expected="norm",
                message=f"{_subject(kind)} {are} trainable{used} and {have} no path to the loss: no gradient arrives at {at}, "
                "not even zero.",
            )
        )
    return hits


def _unused_module(_curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    idle = idle_parameters(run)
    parameters = [p for p in run.parameters if p.kind == "parameter"]
    hits = []
    for kind in _kinds(parameters, {p.name for p in parameters if p.used is False and p.name not in idle}):
        what = f"{_subject(kind)} {'was' if len(kind) == 1 else 'were'} not used in the forward pass"
        what = "No parameter of the model was used in the forward pass" if "" in kind else what
        records = _records(kind)
        size = f"{count(len(records), 'parameter')}, {count(sum(record.numel for record in records), 'element')}"
        hits.append(
            _hit(
                kind,
                metric="used",
                value=float(len(records)),
                expected=0.0,
                message=f"{what} ({size}): memory without effect, which training does not change.",
            )
        )
    return hits


# The modules of one name in several places, each with the parameters that it was found for.
_Kind = dict[str, list["ParameterRecord"]]


def _kinds(parameters: Sequence[ParameterRecord], bad: set[str]) -> list[_Kind]:
    """Find the highest modules all of whose parameters are bad; a parameter among others goes by its own path.

    A tied parameter counts in each of its places.
    """
    total: dict[str, int] = {}
    affected: dict[str, int] = {}
    for record in parameters:
        for name in record.name.split(" = "):
            for prefix in _prefixes(name):
                total[prefix] = total.get(prefix, 0) + 1
                affected[prefix] = affected.get(prefix, 0) + (record.name in bad)
    kinds: dict[str, _Kind] = {}
    for record in parameters:
        if record.name in bad:
            highest = next(prefix for prefix in _prefixes(path(record)) if total[prefix] == affected[prefix])
            kinds.setdefault(pattern(highest), {}).setdefault(highest, []).append(record)
    return list(kinds.values())


def _prefixes(name: str) -> list[str]:
    """Give the paths of the modules around a parameter, the whole model ("") first, and its own."""
    parts = name.split(".")
    return ["", *(".".join(parts[:length]) for length in range(1, len(parts) + 1))]


def _records(kind: _Kind) -> list[ParameterRecord]:
    return [record for members in kind.values() for record in members]


def _is_single(kind: _Kind) -> bool:
    return all(len(members) == 1 for members in kind.values())


def _subject(kind: _Kind) -> str:
    first = next(iter(kind))
    if _is_single(kind):
        return subject(_records(kind))
    if len(kind) == 1:
        return f"The module {first}"
    blocks = [record.block for record in _records(kind) if record.block is not None]
    where = f" ({places('block', blocks)})" if blocks else ""
    return f"The {count(len(kind), 'module')} {pattern(first)}{where}"


def _hit(kind: _Kind, *, metric: str, value: float | str, expected: float | str, message: str) -> Hit:
    module, first = next(iter(kind)), _records(kind)[0]
    place = Place(
        block=first.block,
        sublayer=first.sublayer,
        module=module.rpartition(".")[0] if module == path(first) else module,
        parameter=first.name if _is_single(kind) else None,
    )
    return Hit((), place if module else Place(), metric, value, expected, message)


NO_GRADIENT = Rule(
    of="run",
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

UNUSED_MODULE = Rule(
    of="run",
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

RULES = (NO_GRADIENT, UNUSED_MODULE)
