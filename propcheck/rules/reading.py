"""Gains of norms, and reads past a norm: PC106."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import count, number
from propcheck.rules.norm_groups import kinds, norms_of, place, sites, subject
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, ParameterRecord, Run, SiteRecord


def _norm_gain(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    own = {p.name: p for p in run.parameters}
    off = [norm for norm in norms_of(run) if _is_off(norm, limit) and _has_its_own(norm, own.get(norm.parameter or ""))]
    hits = []
    for group in kinds(off):
        worst = max(group, key=lambda norm: _log(norm.gain))
        gain = worst.gain or 0.0
        hits.append(
            Hit(
                sites=sites(group),
                place=place(worst, curve),
                metric="gain",
                value=gain,
                expected=1.0,
                message=f"{subject(group)} {'applies' if len(group) == 1 else 'apply'} a gain of RMS {number(gain)} at the "
                f"start, where 1 is usual: everything that {'it gives' if len(group) == 1 else 'they give'} is "
                f"{'exactly zero' if gain == 0 else f'x{number(gain)}'}.{_added_one(worst, run)}",
                severity="note" if worst.place == "inside" else None,
            )
        )
    return [*hits, *_bare_reads(curve, limit)]


def _is_off(norm: NormRecord, limit: float) -> bool:
    gain = norm.gain
    if gain is None or not math.isfinite(gain) or norm.kind == "length":
        return False
    if norm.place == "written" and gain < 1:
        return False  # a residual scale
    if norm.block is not None and math.isclose(gain, (norm.block + 1) ** -0.5, rel_tol=0.05):
        return False  # LayerNorm Scaling, folded into the gain
    return gain > limit or gain * limit < 1


def _has_its_own(norm: NormRecord, gain: ParameterRecord | None) -> bool:
    """Whether a norm's gain is one, with a number for each element, and was written (else PC102 reports it)."""
    return gain is None or (gain.init_calls is not None and gain.numel % norm.width == 0)


def _log(gain: float | None) -> float:
    return abs(math.log(gain)) if gain else math.inf


def _added_one(norm: NormRecord, run: Run) -> str:
    """Say so if the gain is the weight and 1."""
    name = norm.parameter or f"{norm.module}.weight"  # a fused norm that was given 1 + weight does not name it
    weight = next((p for p in run.parameters if p.name == name), None)
    if weight is None or weight.mean is None or weight.std is None or norm.gain is None or not abs(weight.mean) > 0.1:
        return ""
    if not math.isclose(math.hypot(1 + weight.mean, weight.std), norm.gain, rel_tol=0.01):
        return ""
    calls = f" ({weight.init_calls})" if weight.init_calls else ""
    return f" It is applied as 1 + weight, and the weight starts at {number(weight.mean)}{calls}."


def _bare_reads(curve: Profile, limit: float) -> list[Hit]:
    """Find sublayers that read the stream both through a norm and past it, at another scale."""
    found: dict[str, list[tuple[SiteRecord, float]]] = {}
    for record in curve.sites:
        ratio = _bare_ratio(record)
        if ratio is not None and (ratio > limit or ratio * limit < 1):
            found.setdefault(record.sublayer, []).append((record, ratio))
    hits = []
    for group in found.values():
        worst, ratio = max(group, key=lambda pair: _log(pair[1]))
        more = f", and so do {count(len(group) - 1, 'more site')} of its kind" if len(group) > 1 else ""
        hits.append(
            Hit(
                sites=tuple(record.site for record, _ in group),
                place=place_of(worst),
                metric="stream_rms / norm_output_rms",
                value=ratio,
                expected=1.0,
                message=f"The sublayer at {site_label(worst)} reads the stream through its norm, at RMS "
                f"{number(worst.norm_output_rms)}, and also past it, at RMS {number(worst.stream_rms)}{more}: what it computes "
                "from the bare stream has another scale. A gate or a router may read it so on purpose; queries, keys and "
                "values hardly.",
                severity="note",  # the records do not tell a gate from a key
                remedy="Give all inputs of the sublayer (query, key and value) the norm's output, or say that the bare read is "
                "meant.",
            )
        )
    return hits


def _bare_ratio(record: SiteRecord) -> float | None:
    if not record.bare_read or not record.norm_output_rms or not record.stream_rms:
        return None
    ratio = record.stream_rms / record.norm_output_rms
    return ratio if 0 < ratio < math.inf else None


NORM_GAIN = Rule(
    scope="run",
    id="PC106",
    name="norm-gain",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a gain, as it is applied, is off 1; and by which a bare and a normed read of one stream differ",
    sees="A norm whose gain, as it is applied, starts far from 1; and a sublayer that reads the stream through its norm and "
    "past it, at two scales.",
    why="A gain multiplies everything that the sublayer reads or writes, in every block, and undoes the scale that the rest of "
    "the init was chosen for. A read past the norm brings the stream's own scale into the sublayer, which the norm is there to "
    "keep out.",
    formula="gain of norms.parquet, the RMS of what the normalised value is multiplied with (of 1 + weight where that is "
    "applied), above threshold or below 1 / threshold. Judged are RMSNorm and LayerNorm, not normalisations to length 1. On "
    "what a branch writes only a gain above is reported: a small one there is a residual scale. 1 / sqrt(block), counted from "
    "1, is LayerNorm Scaling (arXiv 2502.05795) and silent. Inside a branch (queries and keys) a gain may be a temperature: a "
    "note. One finding a kind of norm. For the reads: bare_read, and stream_rms / norm_output_rms off 1 by "
    "more than the threshold; a note, since a gate (as of a highway network) or a router may read the bare stream on purpose, "
    "and what the sublayer makes of it is not recorded.",
    basis="Norms start at gain 1 in all common architectures, so any other gain is worth a reason; 1.5 is this tool's own, as "
    "in PC104 and PC205, no published cut-off was found. The reported fault is a gain of exactly 2.",
    source="Ba 2016, arXiv 1607.06450, and Zhang and Sennrich 2019, arXiv 1910.07467 (gains start at 1); "
    "huggingface/transformers issue 40224 (ones in a norm that adds 1 itself: a gain of 2 in every norm); "
    "facebookresearch/xformers pull request 233 (a pre-norm wrapper that normalised only the first of query, key and value).",
    remedy="Start gains at 1, or at 0 where the norm adds 1 itself; keep the general init off the norms.",
    check=_norm_gain,
)

RULES = (NORM_GAIN,)
