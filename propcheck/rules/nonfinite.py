"""Numbers that are not finite, forward and backward: PC209 and PC305."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import count, number
from propcheck.records import Place, Run, SiteRecord
from propcheck.rules.origins import first_origin, made_by, made_in
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile

# In the order in which the backward pass makes them.
_BACKWARD = ("grad_sum_norm", "grad_update_norm", "param_grad_norm", "grad_stream_norm")


def is_nonfinite(record: SiteRecord) -> bool:
    """Whether a site's sum, or what is known of it, holds a NaN or an infinity."""
    if record.nonfinite is not None:
        return record.nonfinite > 0
    return any(v is not None and not math.isfinite(v) for v in (record.update_rms, record.sum_rms, record.sum_absmax))


def first_nonfinite(curve: Profile) -> SiteRecord | None:
    """Find the first site whose sum holds a NaN or an infinity."""
    return next((record for record in curve.sites if is_nonfinite(record)), None)


def _nonfinite_activation(curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    bad = [record for record in curve.sites if is_nonfinite(record)]
    if not bad:
        return []
    first = bad[0]
    amount = "NaN or infinite elements" if first.nonfinite is None else count(first.nonfinite, "NaN or infinite element")
    known = first_origin(run, curve.sites, "forward")
    place = place_of(first) if known is None else made_in(known, curve.sites, first)
    if first.stream_rms is not None and not math.isfinite(first.stream_rms):
        origin = "the stream already was so when the sublayer read it"
    elif first.update_rms is not None and not math.isfinite(first.update_rms):
        measured = "" if place.block == first.block else " at every token that counts"
        origin = f"they come from the update, the stream before it is finite{measured}"
    elif first.stream_rms is not None and first.update_rms is not None:
        origin = "stream and update are finite, their sum overflows"
    else:
        origin = "nothing before it was seen to be"
    later = f" It is also so at {count(len(bad) - 1, 'later site')}." if len(bad) > 1 else ""
    gradients = [r for r in curve.sites if r.grad_stream_norm is not None and not math.isfinite(r.grad_stream_norm)]
    backward = f" The gradient is not finite at {count(len(gradients), 'site')}." if gradients else ""
    return [
        Hit(
            sites=tuple(record.site for record in bad),
            place=place,
            metric="nonfinite",
            value=first.nonfinite,
            expected=0.0,
            message=f"The sum at {site_label(first)} holds {amount}: {origin}.{made_by(known)}{later}{backward}",
        )
    ]


def _nonfinite_gradient(curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    if first_nonfinite(curve) is not None:
        return []  # PC209 names the cause and counts these
    bad = [record for record in curve.sites if _bad_gradient(record)]
    if not bad:
        return _beside_the_stream(curve, run)
    first = bad[-1]  # the backward pass comes from the end
    metric = _bad_gradient(first) or ""
    value = getattr(first, metric)
    loss = run.loss.value
    spoilt = loss is not None and not math.isfinite(loss)
    known = first_origin(run, curve.sites, "forward" if spoilt else "backward")
    if spoilt:
        # Padding is not measured, and a loss may count it.
        within = " at every token that counts" if known is not None and known.block is not None else ""
        place = ", so it starts behind the last block" if known is None else ""
        origin = f"the loss itself is {number(loss)} although every sum is finite{within}{place}"
    elif metric == "grad_sum_norm" and first is curve.sites[-1]:
        origin = "it is so already when it leaves head and loss, although the loss is finite"
    elif metric == "grad_sum_norm":
        origin = "every gradient later in the forward order is finite"
    else:
        origin = "the gradient that reaches this sublayer is finite, so its own backward makes it"
    more = (
        f" It is also so at {count(len(bad) - 1, 'earlier site')}, which the gradient reaches after it." if len(bad) > 1 else ""
    )
    return [
        Hit(
            sites=tuple(record.site for record in bad),
            place=place_of(first),
            metric=metric,
            value=value,
            expected="finite",
            message=f"The gradient is not finite at {site_label(first)} ({metric} is {number(value)}): {origin}."
            f"{made_by(known)}{more}",
        )
    ]


def _bad_gradient(record: SiteRecord) -> str | None:
    """Name the first gradient of a site, in backward order, that is NaN or infinite."""
    values = ((name, getattr(record, name)) for name in _BACKWARD)
    return next((name for name, value in values if value is not None and not math.isfinite(value)), None)


def _beside_the_stream(curve: Profile, run: Run) -> list[Hit]:
    """Find a loss, or else gradients of parameters, that are not finite where all streams are; told with the first stream."""
    if curve.sites[0].site != min(record.site for record in run.sites):
        return []
    # Of the loss there is one number for all seeds, and parameters are of one: any seed's stream may be what spoilt them.
    if any(is_nonfinite(record) or _bad_gradient(record) is not None for record in run.sites):
        return []
    loss = run.loss.value
    if loss is not None and not math.isfinite(loss):
        made = made_by(first_origin(run, curve.sites, "forward"))
        return [
            Hit(
                sites=(),
                place=Place(),
                metric="loss",
                value=loss,
                expected="finite",
                message=f"The loss is {number(loss)}, although every sum of the stream, and every gradient that was seen of "
                f"it, is finite.{made}",
                remedy="Look at what the loss divides by (the mean over targets that are all ignored, or masked, is 0 / 0), "
                "and at a logarithm of 0.",
            )
        ]
    parameters = [p.name for p in run.parameters if p.grad_state == "nonfinite"]
    if not parameters:
        return []
    more = f" and {count(len(parameters) - 1, 'more parameter')}" if len(parameters) > 1 else ""
    subject, verb, others = ("gradients", "are", "those") if more else ("gradient", "is", "that")
    return [
        Hit(
            sites=(),
            place=Place(parameter=parameters[0]),
            metric="grad_state",
            value="nonfinite",
            expected="finite",
            message=f"The {subject} of {parameters[0]}{more} {verb} NaN or infinite, although {others} of the stream "
            f"{verb} finite at every site.{made_by(first_origin(run, curve.sites, 'backward'))}",
        )
    ]


NONFINITE_ACTIVATION = Rule(
    id="PC209",
    name="non-finite-activation",
    severity="error",
    threshold=0.0,
    unit="NaN or infinite elements in a sum; this rule always judges at 0",
    sees="NaN or infinity in the stream.",
    why="Everything that reads it is lost, the loss included: the first step of training destroys the weights.",
    formula="nonfinite > 0. The first site in forward order is reported, with where it came from (stream, update, or "
    "overflow of the sum) and how many later sites follow. The pass is run a second time with the result of every function "
    "looked at, and the one is named that first made NaN or infinity out of finite numbers; an infinity that is written as "
    "such, as into a mask, is none. Where it lies in an earlier block than the first such sum (padding is not measured), the "
    "finding's place is there.",
    basis="Arithmetic: no number of them is acceptable.",
    source="IEEE 754: NaN and infinity propagate through sums and products.",
    remedy="Look at the operation named, or where none is, at the sublayer: fully masked attention rows, exponentials of "
    "positive sums, division by zero, or a range that the dtype does not have (fp16 ends at 65504).",
    check=_nonfinite_activation,
    seeds="any",
    caused_by=(("PC102", "any"),),
)

NONFINITE_GRADIENT = Rule(
    id="PC305",
    name="non-finite-gradient",
    severity="error",
    threshold=0.0,
    unit="NaN or infinite gradients; this rule always judges at 0",
    sees="NaN or infinity in the gradients, or in the loss, while the forward pass is finite.",
    why="The first optimiser step writes it into the weights.",
    formula="Any of grad_sum_norm, grad_update_norm, param_grad_norm, grad_stream_norm is NaN or infinite, or a parameter's "
    "grad_state is nonfinite, or the loss is; the last two only where the stream is finite in every seed. The last site in "
    "forward order, which the backward pass meets first, is reported. Where the "
    "forward pass is not finite either, PC209 reports both. The pass is run a second time with every step of the backward pass "
    "watched, and the one is named that first made a gradient that is not finite out of finite ones.",
    basis="Arithmetic: no number of them is acceptable.",
    source="IEEE 754: NaN and infinity propagate through sums and products.",
    remedy="Look at the backward of the sublayer named: a square root or norm at 0, log or division at 0, a masked softmax, "
    "or an overflow of the dtype.",
    check=_nonfinite_gradient,
    seeds="any",
)

RULES = (NONFINITE_ACTIVATION, NONFINITE_GRADIENT)
