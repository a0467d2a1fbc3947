"""PC401: a first loss far above ln(vocabulary), or logits that are all equal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import place
from propcheck.formatting import number
from propcheck.records import Place
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import LossInfo, Run, Severity

# A loss above this multiple of what the spread of the logits explains has another cause too.
_UNEXPLAINED = 1.2

RULE = Rule(
    scope="run",
    id="PC401",
    name="initial-loss",
    severity="warning",
    threshold=1.5,
    unit="first loss / ln(vocabulary)",
    sees="A first loss far above that of a uniform guess; and logits that are all equal.",
    why="A model that knows nothing should spread its guess evenly. A higher loss comes from the scale of the logits alone, "
    "and the first training steps go into undoing it. Equal logits give exactly ln(vocabulary), which looks healthy but may be "
    "a head that no signal reaches.",
    formula="loss > threshold x ln V. Logits of std s that are independent of the targets give ln V + s^2 / 2 up to s = sqrt(2 "
    "ln V), where this is 2 ln V, and at most s sqrt(2 ln V) above. Or logit_std = 0: a note if a zero weight outside the "
    "blocks has a gradient (a head that starts at zero), an error if no parameter has one, else a warning. A loss that is not "
    "finite is left to PC209 and PC305. A loss below ln V is not judged.",
    basis="At the published initialisation of Qwen3.8-27B the ratio is 1.08. 1.5 is reached at s = sqrt(ln V), which is 0.71 "
    "of the std where the softmax concentrates on a few entries (PC402). 1.5 is this tool's own choice; no published cut-off "
    "was found.",
    source="huggingface/transformers pull request 26441 (an untied head with std 1: a first loss of about 110, and 11 with std "
    "1 / sqrt(width)); the mean of exp(x) of a normal x, exp(s^2 / 2); Derrida 1981, Phys. Rev. B 24, 2613 (sums of "
    "exponentials of many independent normal numbers).",
    remedy="Initialise the head with std 1 / sqrt(width), or as small as the embedding, and put a norm before it.",
    example=Example(
        broken="nn.init.normal_(head.weight, std=1.0)",
        repaired="nn.init.normal_(head.weight, std=width**-0.5)",
    ),
    caused_by=(("PC201", "any"), ("PC209", "any"), ("PC305", "any")),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Compare the first loss with ln(vocabulary)."""
    loss = run.loss
    if loss.value is None or loss.uniform is None or not math.isfinite(loss.value) or not loss.uniform > 0:
        return []
    if loss.logit_std == 0:
        return [_equal_logits_hit(run, loss.value, loss.uniform)]
    if not loss.value > threshold * loss.uniform:
        return []
    return [
        Hit(
            sites=(),
            place=Place(),
            metric="loss",
            value=loss.value,
            expected=loss.uniform,
            message=f"The first loss is {number(loss.value)}, {number(loss.value / loss.uniform)} times that of a uniform "
            f"guess, ln(vocabulary) = {number(loss.uniform)}. The model starts out confident and wrong, and the first training "
            f"steps go into shrinking its logits.{_explanation(loss)}",
        )
    ]


def _explanation(loss: LossInfo) -> str:
    """Compare the loss with that of independent normal logits of the same spread."""
    spread = loss.logit_std
    if spread is None or loss.uniform is None or not math.isfinite(spread):
        return ""
    critical = math.sqrt(2 * loss.uniform)
    if spread <= critical:
        law, explained = "ln V + s^2 / 2", loss.uniform + spread**2 / 2
    else:
        law, explained = "at most s sqrt(2 ln V)", spread * critical
    text = f" Random logits of the measured standard deviation, s = {number(spread)}, give {law} = {number(explained)}"
    largest = loss.logit_absmax
    if loss.value is None or loss.value < _UNEXPLAINED * explained or largest is None or not largest > explained:
        return f"{text}."
    return (
        f"{text}; the rest comes from single logits of up to {number(largest)}, far outside that spread. A head tied to the "
        "embedding has such a logit for each input token."
    )


def _equal_logits_hit(run: Run, value: float, uniform: float) -> Hit:
    """Judge logits that are all equal by whether training can change them."""
    trained = [p for p in run.parameters if p.kind == "parameter" and p.requires_grad]
    zero = [p for p in trained if p.block is None and p.absmax == 0 and p.grad_state == "norm"]
    severity: Severity
    if zero:
        severity, where = "note", place(zero[0])
        cause = f"{zero[0].name} starts at zero, but has a gradient, so the first training step ends this."
        remedy = "No action is needed if the zero is intended."
    elif not trained or any(p.grad_state not in ("zero", "none") for p in trained):
        severity, where = "warning", Place()
        cause = "What the model computes does not reach them."
        remedy = "Check the head's input and its weight: one of them is zero, or the same for the whole vocabulary."
    else:
        severity, where = "error", Place()
        cause = "No parameter gets a gradient, so training cannot change this."
        remedy = "Check the head's input and its weight: both are zero, or the path to the loss is cut."
    message = (
        f"All logits of a token are equal (standard deviation 0), so the first loss is {number(value)}, that of a uniform "
        f"guess: ln(vocabulary) = {number(uniform)}. {cause}"
    )
    return Hit((), where, "logit_std", 0.0, "above 0", message, severity, remedy)
