"""PC209: NaN or infinity in the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.formatting import count
from propcheck.rules.origins import first_origin, holds_nonfinite, is_finite, made_by, origin_place
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.site_groups import place_of, site_label

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Place, Run, SiteRecord

RULE = Rule(
    id="PC209",
    name="non-finite-activation",
    severity="error",
    threshold=0.0,
    unit="NaN or infinite elements in a sum; this rule always judges at 0",
    sees="NaN or infinity in the stream.",
    why="Everything that reads it is lost, including the loss. The first training step destroys the weights.",
    formula="nonfinite > 0. The first site in forward order is reported, with its origin (stream, update, or overflow of the "
    "sum) and the number of later sites. The pass is repeated with the result of every function checked, and the function is "
    "named that first made NaN or infinity from finite numbers. An infinity written on purpose, as into a mask, does not "
    "count. If the function lies in an earlier block than the first such sum (padding is not measured), the finding is placed "
    "there.",
    basis="Arithmetic: no number of them is acceptable.",
    source="IEEE 754: NaN and infinity propagate through sums and products.",
    remedy="Look at the operation named, else at the sublayer: fully masked attention rows, exponentials of positive sums, "
    "division by zero, or a value beyond the dtype's range (fp16 ends at 65504).",
    example=Example(
        broken="weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)  # NaN in a row that is masked entirely",
        repaired="weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)",
    ),
    seeds="any",
    caused_by=(("PC102", "any"),),
)


@RULE.checked_by
def check(profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Report the first sum that is not finite."""
    bad = [site for site in profile.sites if holds_nonfinite(site)]
    if not bad:
        return []
    first = bad[0]
    elements = "NaN or infinite elements" if first.nonfinite is None else count(first.nonfinite, "NaN or infinite element")
    origin = first_origin(run, profile.sites, "forward")
    place = place_of(first) if origin is None else origin_place(origin, profile.sites, first)
    later = f" {count(len(bad) - 1, 'later site')} {'holds' if len(bad) == 2 else 'hold'} them too." if len(bad) > 1 else ""
    gradients = sum(not is_finite(site.grad_stream_norm) for site in profile.sites)
    backward = f" The gradient is not finite at {count(gradients, 'site')}." if gradients else ""
    return [
        Hit(
            sites=tuple(site.site for site in bad),
            place=place,
            metric="nonfinite",
            value=first.nonfinite,
            expected=0.0,
            message=f"The sum at {site_label(first)} holds {elements}: "
            f"{_entry(first, place)}.{made_by(origin)}{later}{backward}",
        )
    ]


def _entry(first: SiteRecord, place: Place) -> str:
    """Say which operand of the sum is not finite."""
    if not is_finite(first.stream_rms):
        return "the stream was already not finite when the sublayer read it"
    if not is_finite(first.update_rms):
        measured = "" if place.block == first.block else " at every token that counts"
        return f"they come from the update; the stream before it is finite{measured}"
    if first.stream_rms is not None and first.update_rms is not None:
        return "stream and update are finite; their sum overflows"
    return "no earlier value was observed that is not finite"
