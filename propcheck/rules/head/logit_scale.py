"""PC402: output or attention logits so large that their softmax picks single entries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import place
from propcheck.formatting import count, number
from propcheck.records import Place
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run, SiteRecord

# Attention logits of this size have preceded loss spikes; runs whose logits passed ten times that diverged.
_MAX_ATTENTION_LOGIT = 1000.0
# Fraction of the entropy of uniform weights: a bias by distance alone leaves more, random logits of this size far less.
_COLLAPSED_ENTROPY = 0.1
# ln of more rows than any vocabulary has.
_MAX_UNIFORM_LOSS = 50

RULE = Rule(
    scope="run",
    id="PC402",
    name="logit-scale",
    severity="warning",
    threshold=1.0,
    unit="standard deviation of the logits over the vocabulary / sqrt(2 ln V)",
    sees="Logits so large at initialisation that their softmax picks single entries: those of the head, and those of "
    "attention.",
    why="The softmax of V random logits is spread over many entries while their std is below sqrt(2 ln V), and concentrates on "
    "a few above. The head then makes confident, wrong predictions; attention reads a few keys that the random init picked.",
    formula="logit_std > threshold x sqrt(2 ln V), where logit_std is the std of a token's logits over the vocabulary. Or "
    f"attention_logit_absmax > {_MAX_ATTENTION_LOGIT:g} (scaled logits, before the softmax; the threshold does not change "
    f"this) and attention_entropy <= {_COLLAPSED_ENTROPY:g}: a bias by distance also makes large logits, but leaves the "
    "weights spread. Attention whose weights were not observed is not judged. One finding per kind of sublayer.",
    basis="sqrt(2 ln V) is where the random energy model, the softmax of independent normal logits, freezes. In attention, "
    "logits above 1000 were seen before loss spikes and above 10,000 in runs that diverged; both were seen during training, "
    "not at its start, so this is never more than a warning. The limit on the entropy is this tool's own choice. A bias of -m "
    "x distance alone leaves an entropy of -ln(1 - e^-m) + m / (e^m - 1), however long the context. For ALiBi's slopes, all "
    "below 1, that is above 1.04, and so above 0.1 ln(keys) for up to 33,000 keys even if all heads had the steepest slope. "
    "Independent normal logits of std 250 leave 0.019 over 256 keys, 0.0034 of ln 256.",
    source="Derrida 1981, Phys. Rev. B 24, 2613; Press 2021, arXiv 2108.12409 (ALiBi); Giorlandino and Goldt 2025, arXiv "
    "2505.24333 (attention at initialisation as a random energy model: entropy collapse at large query and key weights); "
    "Wortsman 2023, arXiv 2309.14322, and Dehghani 2023, arXiv 2302.05442 (growth of attention logits; the levels are taken "
    "from secondary reports); huggingface/transformers pull request 26441.",
    remedy="Initialise the head with std 1 / sqrt(width), or scale its logits down.",
    example=Example(
        broken="scores = q @ k.transpose(-2, -1)",
        repaired="scores = q @ k.transpose(-2, -1) * head_width**-0.5",
    ),
    caused_by=(("PC201", "any"), ("PC209", "any"), ("PC305", "any"), ("PC106", "same")),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Check the logits of the head and of every attention."""
    return [*_output_logit_hits(run, threshold), *_attention_logit_hits(profile)]


def _output_logit_hits(run: Run, threshold: float) -> list[Hit]:
    spread, uniform = run.loss.logit_std, run.loss.uniform
    if spread is None or uniform is None or not uniform > 0 or not threshold * math.sqrt(2 * uniform) < spread < math.inf:
        return []
    critical = math.sqrt(2 * uniform)
    head = _head_weight(run, uniform)
    return [
        Hit(
            sites=(),
            place=Place() if head is None else place(head),
            metric="logit_std",
            value=spread,
            expected=critical,
            message=f"The logits have a standard deviation of {number(spread)} over the vocabulary, "
            f"{number(spread / critical)} times the limit of sqrt(2 ln V) = {number(critical)}. Above it, the softmax of "
            f"random logits concentrates on a few entries: the first predictions are close to one-hot, and "
            f"wrong.{_head_scale(head)}",
        )
    ]


def _head_weight(run: Run, uniform: float) -> ParameterRecord | None:
    """Find the matrix with one row per vocabulary entry, if there is only one."""
    rows = round(math.exp(uniform)) if uniform < _MAX_UNIFORM_LOSS else 0
    candidates = [
        p
        for p in run.parameters
        if p.block is None and len(p.shape) == 2 and p.shape[0] == rows and (p.role == "linear" or " = " in p.name)
    ]
    return candidates[0] if len(candidates) == 1 else None


def _head_scale(head: ParameterRecord | None) -> str:
    if head is None or head.std is None:
        return ""
    calls = f" ({head.init_calls})" if head.init_calls else ""
    width = head.shape[1]
    return (
        f" The head {head.name} has std {number(head.std)}{calls}: an input of RMS 1 gives logits of std "
        f"{number(head.std * width**0.5)}, where std 1 / sqrt({width}) = {number(width**-0.5)} would give 1."
    )


def _attention_logit_hits(profile: Profile) -> list[Hit]:
    by_sublayer: dict[str, list[SiteRecord]] = {}
    for site in profile.sites:
        largest, entropy = site.attention_logit_absmax, site.attention_entropy
        if largest is None or entropy is None:
            continue  # only the weights tell logits that decide them from a bias by distance
        if _MAX_ATTENTION_LOGIT < largest < math.inf and entropy <= _COLLAPSED_ENTROPY:
            by_sublayer.setdefault(site.sublayer, []).append(site)
    return [_attention_logit_hit(group) for group in by_sublayer.values()]


def _attention_logit_hit(group: Sequence[SiteRecord]) -> Hit:
    worst = max(group, key=lambda site: site.attention_logit_absmax or 0.0)
    limit = f"{_MAX_ATTENTION_LOGIT:g}"
    more = f" {count(len(group), 'site').capitalize()} of this kind are above {limit}." if len(group) > 1 else ""
    return Hit(
        sites=tuple(site.site for site in group),
        place=place_of(worst),
        metric="attention_logit_absmax",
        value=worst.attention_logit_absmax,
        expected=f"below {limit}",
        message=f"The attention at {site_label(worst)} has logits of up to {number(worst.attention_logit_absmax)} (RMS "
        f"{number(worst.attention_logit_rms)}), expected below {limit}, and its weights concentrate on few keys: their entropy "
        f"is {number(worst.attention_entropy)} of that of uniform weights (mean over heads and queries). In training, logits "
        f"above {limit} have preceded loss spikes.{more}",
        remedy="Scale the attention scores by 1 / sqrt(head width), initialise the query and key projections smaller, or "
        "normalise queries and keys (QK-norm). If a position bias makes the logits this large, flatten it.",
    )
