"""The first loss, and logits so large that their softmax picks single entries: PC401 and PC402."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import place
from propcheck.formatting import count, number
from propcheck.records import Place
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import LossInfo, ParameterRecord, Run, Severity, SiteRecord

# Attention logits of this size precede loss spikes; runs whose logits passed ten times that diverged.
_ATTENTION_LOGIT = 1000.0
# Above this factor on what the spread of the logits explains, the loss has another cause too.
_UNEXPLAINED = 1.2
# Of the entropy of uniform weights: a bias by distance alone leaves more, logits this large without any order far less.
_COLLAPSED = 0.1


def _initial_loss(_curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    loss = run.loss
    if loss.value is None or loss.uniform is None or not math.isfinite(loss.value) or not loss.uniform > 0:
        return []
    if loss.logit_std == 0:
        return [_dead_logits(run, loss.value, loss.uniform)]
    if not loss.value > limit * loss.uniform:
        return []
    return [
        Hit(
            sites=(),
            place=Place(),
            metric="loss",
            value=loss.value,
            expected=loss.uniform,
            message=f"The first loss is {number(loss.value)}, x{number(loss.value / loss.uniform)} that of a uniform guess, "
            f"ln(vocabulary) = {number(loss.uniform)}.{_explained(loss)}",
        )
    ]


def _explained(loss: LossInfo) -> str:
    """Say what loss the spread of the logits alone makes, by the two laws of independent normal logits."""
    spread = loss.logit_std
    if spread is None or loss.uniform is None or not math.isfinite(spread):
        return ""
    critical = math.sqrt(2 * loss.uniform)
    if spread <= critical:
        law, expected = "ln V + s^2 / 2", loss.uniform + spread**2 / 2
    else:
        law, expected = "at most s sqrt(2 ln V)", spread * critical
    told = f" Logits of their standard deviation, s = {number(spread)}, that know nothing of the target give {law} = "
    largest = loss.logit_absmax
    if loss.value is None or loss.value < _UNEXPLAINED * expected or largest is None or not largest > expected:
        return f"{told}{number(expected)}."
    return (
        f"{told}{number(expected)}; the rest is made by single logits of up to {number(largest)}, far outside that spread, as "
        "the input's own word has with a head that is tied to the embedding."
    )


def _dead_logits(run: Run, value: float, uniform: float) -> Hit:
    """Judge logits that are all equal: a zero that training ends, or one that it does not."""
    trained = [p for p in run.parameters if p.kind == "parameter" and p.requires_grad]
    zero = [p for p in trained if p.block is None and p.absmax == 0 and p.grad_state == "norm"]
    told = f"All logits of a token are equal, so the first loss is {number(value)}, ln(vocabulary) = {number(uniform)}"
    severity: Severity
    if zero:
        severity, where = "note", place(zero[0])
        more = f": {zero[0].name} is zero at the start, and has a gradient, so the first step ends this"
        remedy = "Nothing, if the zero is meant."
    elif not trained or any(p.grad_state not in ("zero", "none") for p in trained):
        severity, where = "warning", Place()
        more = ": what the model computes does not reach them"
        remedy = "Look at what the head reads and at its weight: one of them is zero, or the same for the whole vocabulary."
    else:
        severity, where = "error", Place()
        more = ", and no parameter gets a gradient: training cannot end this"
        remedy = "Look at what the head reads and at its weight: both are zero, or the way to the loss is cut."
    return Hit((), where, "logit_std", 0.0, "above 0", f"{told}{more}.", severity, remedy)


def _logit_scale(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    return [*_output_logits(run, limit), *_attention_logits(curve)]


def _output_logits(run: Run, limit: float) -> list[Hit]:
    spread, uniform = run.loss.logit_std, run.loss.uniform
    if spread is None or uniform is None or not uniform > 0 or not limit * math.sqrt(2 * uniform) < spread < math.inf:
        return []
    critical = math.sqrt(2 * uniform)
    head = _head(run, uniform)
    return [
        Hit(
            sites=(),
            place=Place() if head is None else place(head),
            metric="logit_std",
            value=spread,
            expected=critical,
            message=f"The logits have a standard deviation of {number(spread)} over the vocabulary, "
            f"x{number(spread / critical)} the {number(critical)}, sqrt(2 ln V), from which on the softmax of random logits "
            f"falls on a few entries: the first predictions are near one-hot, and wrong.{_head_in_words(head)}",
        )
    ]


def _head(run: Run, uniform: float) -> ParameterRecord | None:
    """Find the matrix with a row for each word, if there is one only."""
    rows = round(math.exp(uniform)) if uniform < 50 else 0
    found = [
        p
        for p in run.parameters
        if p.block is None and len(p.shape) == 2 and p.shape[0] == rows and (p.role == "linear" or " = " in p.name)
    ]
    return found[0] if len(found) == 1 else None


def _head_in_words(head: ParameterRecord | None) -> str:
    if head is None or head.std is None:
        return ""
    calls = f", {head.init_calls}" if head.init_calls else ""
    width = head.shape[1]
    return (
        f" The head {head.name} has std {number(head.std)}{calls}; on an input of RMS 1 that makes logits of "
        f"{number(head.std * width**0.5)}, and 1 / sqrt({width}) = {number(width**-0.5)} makes 1."
    )


def _attention_logits(curve: Profile) -> list[Hit]:
    found: dict[str, list[SiteRecord]] = {}
    for record in curve.sites:
        largest, entropy = record.attention_logit_absmax, record.attention_entropy
        if largest is None or entropy is None:
            continue  # without the weights, logits that decide them are not told from a bias by distance
        if _ATTENTION_LOGIT < largest < math.inf and entropy <= _COLLAPSED:
            found.setdefault(record.sublayer, []).append(record)
    hits = []
    for group in found.values():
        worst = max(group, key=lambda record: record.attention_logit_absmax or 0.0)
        more = (
            f" {count(len(group), 'site').capitalize()} of its kind are above {_ATTENTION_LOGIT:g}." if len(group) > 1 else ""
        )
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(worst),
                metric="attention_logit_absmax",
                value=worst.attention_logit_absmax,
                expected=f"below {_ATTENTION_LOGIT:g}",
                message=f"The attention at {site_label(worst)} has logits of up to {number(worst.attention_logit_absmax)} (RMS "
                f"{number(worst.attention_logit_rms)}), and its weights fall on few keys: their entropy is "
                f"{number(worst.attention_entropy)} of that of uniform ones, in the mean over heads and queries.{more}",
                remedy="Scale the products by 1 / sqrt(head width), draw the query and key projections smaller, or normalise "
                "queries and keys (QK-norm). If a bias makes the logits this large, make it flatter.",
            )
        )
    return hits


INITIAL_LOSS = Rule(
    scope="run",
    id="PC401",
    name="initial-loss",
    severity="warning",
    threshold=1.5,
    unit="first loss / ln(vocabulary)",
    sees="A first loss far above that of a uniform guess; and logits that are all equal.",
    why="A model that knows nothing should spread its guess. A higher loss is made by the scale of the logits alone, and the "
    "first steps of training go into taking it back. Equal logits give exactly ln(vocabulary), which looks healthy and may be "
    "a head that nothing reaches.",
    formula="loss > threshold x ln V. Logits of standard deviation s, independent of the target, give ln V + s^2 / 2 up to "
    "s = sqrt(2 ln V), which is 2 ln V there, and at most s sqrt(2 ln V) above. Or logit_std = 0: a note where a zero weight "
    "outside the blocks has a gradient (zero at the start on purpose), an error where no parameter has one, else a warning. A "
    "loss that is not finite is left to PC209 and PC305. A loss below ln V is not judged.",
    basis="Measured at the published initialisation of Qwen3.8-27B: 1.08. 1.5 is reached at s = sqrt(ln V), 0.71 of where the "
    "softmax falls on a few entries (PC402). The number is this tool's own, no published cut-off was found.",
    source="huggingface/transformers pull request 26441 (an untied head with std 1: a first loss of about 110, and 11 with std "
    "1 / sqrt(width)); the mean of exp(x) of a normal x, exp(s^2 / 2); Derrida 1981, Phys. Rev. B 24, 2613 (sums of "
    "exponentials of many independent normal numbers).",
    remedy="Draw the head with std 1 / sqrt(width), or as small as the embedding, and put a norm before it.",
    check=_initial_loss,
    caused_by=(("PC201", "any"), ("PC209", "any"), ("PC305", "any")),
)

LOGIT_SCALE = Rule(
    scope="run",
    id="PC402",
    name="logit-scale",
    severity="warning",
    threshold=1.0,
    unit="standard deviation of the logits over the vocabulary / sqrt(2 ln V)",
    sees="Logits so large at the start that their softmax picks single entries: those of the head, and those of attention.",
    why="A softmax over V random logits is spread over many entries up to a standard deviation of sqrt(2 ln V), and falls on a "
    "few above. The head then makes confident, wrong predictions; attention reads few keys, which the draw has chosen.",
    formula="logit_std > threshold x sqrt(2 ln V), logit_std being the standard deviation of a token's logits over the "
    f"vocabulary. And attention_logit_absmax > {_ATTENTION_LOGIT:g} (scaled logits, before the softmax; not changed by the "
    f"threshold) where attention_entropy is at most {_COLLAPSED:g}: a bias by distance makes large logits too, and leaves the "
    "weights spread. Weights that were not seen are not judged. One finding a kind of sublayer.",
    basis="sqrt(2 ln V) is where the random energy model freezes, which is the softmax of independent normal logits. For "
    "attention, logits above 1000 were seen before loss spikes and above 10,000 in runs that diverged, both in training and "
    "not at its start: so a warning at any size. That their entropy must be low is this tool's own choice: a bias of -m times "
    "the distance alone leaves -ln(1 - e^-m) + m / (e^m - 1), however long the context, which for ALiBi's slopes, all below 1, "
    "is above 1.04, and so above 0.1 of ln(keys) up to 33,000 keys even if all heads had the steepest. Independent normal "
    "logits of standard deviation 250 leave 0.019 over 256 keys, 0.0034 of ln 256.",
    source="Derrida 1981, Phys. Rev. B 24, 2613; Press 2021, arXiv 2108.12409 (ALiBi); Giorlandino and Goldt 2025, arXiv "
    "2505.24333 (attention at initialisation as a random energy model: entropy collapse at large query and key weights); "
    "Wortsman 2023, arXiv 2309.14322, and Dehghani 2023, arXiv 2302.05442 (growth of attention logits; the levels are taken "
    "from secondary reports); huggingface/transformers pull request 26441.",
    remedy="Draw the head with std 1 / sqrt(width), or divide its logits.",
    check=_logit_scale,
    caused_by=(("PC201", "any"), ("PC209", "any"), ("PC305", "any"), ("PC106", "same")),
)

RULES = (INITIAL_LOSS, LOGIT_SCALE)
