"""PC305: NaN or infinity in the gradients or in the loss, while the forward pass is finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.formatting import count, number
from propcheck.records import Place
from propcheck.rules.origins import first_origin, holds_nonfinite, is_finite, made_by
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Origin, Run, SiteRecord

# In the order in which the backward pass computes them.
_BACKWARD = ("grad_sum_norm", "grad_update_norm", "param_grad_norm", "grad_stream_norm")

RULE = Rule(
    id="PC305",
    name="non-finite-gradient",
    severity="error",
    threshold=0.0,
    unit="NaN or infinite gradients; this rule always judges at 0",
    sees="NaN or infinity in the gradients or in the loss, while the forward pass is finite.",
    why="The first optimiser step writes it into the weights.",
    formula="Any of grad_sum_norm, grad_update_norm, param_grad_norm and grad_stream_norm is NaN or infinite; or a parameter's "
    "grad_state is nonfinite, or the loss is not finite. The last two count only if the stream is finite in every seed. The "
    "last site in forward order is reported, which the backward pass meets first. If the forward pass is not finite either, "
    "PC209 reports both. The pass is repeated with every step of the backward pass checked, and the step is named that first "
    "made a gradient that is not finite from finite ones.",
    basis="Arithmetic: no number of them is acceptable.",
    source="IEEE 754: NaN and infinity propagate through sums and products.",
    remedy="Look at the backward of the sublayer named: a square root or norm at 0, a log or division at 0, a masked softmax, "
    "or an overflow of the dtype.",
    example=Example(
        broken="length = x.pow(2).sum(-1).sqrt()  # at x = 0 the gradient is 0 times infinity",
        repaired="length = (x.pow(2).sum(-1) + 1e-12).sqrt()",
    ),
    seeds="any",
)


@RULE.checked_by
def check(profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Report the first gradient, in backward order, that is not finite."""
    if any(holds_nonfinite(site) for site in profile.sites):
        return []  # PC209 names the cause and counts the gradients
    bad = [site for site in profile.sites if _nonfinite_metric(site)]
    return [_site_hit(profile, run, bad)] if bad else _outside_the_stream(profile, run)


def _nonfinite_metric(site: SiteRecord) -> str | None:
    """Name the first gradient of a site, in backward order, that is NaN or infinite."""
    return next((name for name in _BACKWARD if not is_finite(getattr(site, name))), None)


def _site_hit(profile: Profile, run: Run, bad: list[SiteRecord]) -> Hit:
    first = bad[-1]  # the backward pass comes from the end
    metric = _nonfinite_metric(first) or ""
    value = getattr(first, metric)
    loss = run.loss.value
    origin = first_origin(run, profile.sites, "backward" if is_finite(loss) else "forward")
    entry = _entry(metric, is_last=first is profile.sites[-1]) if is_finite(loss) else _loss_entry(loss, origin)
    more = f" {count(len(bad) - 1, 'earlier site')}, which the gradient reaches later, {_verb(len(bad) - 1)} not finite either."
    return Hit(
        sites=tuple(site.site for site in bad),
        place=place_of(first),
        metric=metric,
        value=value,
        expected="finite",
        message=f"The gradient is not finite at {site_label(first)} ({metric} is {number(value)}): {entry}.{made_by(origin)}"
        f"{more if len(bad) > 1 else ''}",
    )


def _verb(amount: int) -> str:
    return "is" if amount == 1 else "are"


def _entry(metric: str, *, is_last: bool) -> str:
    """Say where a gradient stops being finite, if the loss is finite."""
    if metric != "grad_sum_norm":
        return "the gradient that reaches this sublayer is finite, so its own backward produces it"
    if is_last:
        return "it is not finite when it leaves the head and the loss, although the loss is finite"
    return "every gradient later in the forward order is finite"


def _loss_entry(loss: float | None, origin: Origin | None) -> str:
    # Padding is not measured, and the loss may count it.
    within = " at every token that counts" if origin is not None and origin.block is not None else ""
    start = ", so it starts after the last block" if origin is None else ""
    return f"the loss itself is {number(loss)}, although every sum is finite{within}{start}"


# ---------------------------------------------------------------------- loss and parameters, if all streams are finite


def _outside_the_stream(profile: Profile, run: Run) -> list[Hit]:
    """Find a loss, or else gradients of parameters, that are not finite; reported once, with the first stream."""
    if profile.sites[0].site != min(site.site for site in run.sites):
        return []
    # There is one loss for all seeds, and parameters are recorded for one: any seed's stream may have spoilt them.
    if any(holds_nonfinite(site) or _nonfinite_metric(site) is not None for site in run.sites):
        return []
    if not is_finite(run.loss.value):
        return [_loss_hit(profile, run)]
    parameters = [p.name for p in run.parameters if p.grad_state == "nonfinite"]
    return [_parameter_hit(profile, run, parameters)] if parameters else []


def _loss_hit(profile: Profile, run: Run) -> Hit:
    return Hit(
        sites=(),
        place=Place(),
        metric="loss",
        value=run.loss.value,
        expected="finite",
        message=f"The loss is {number(run.loss.value)}, although every sum of the stream, and every observed gradient of it, "
        f"is finite.{made_by(first_origin(run, profile.sites, 'forward'))}",
        remedy="Check what the loss divides by: a mean over targets that are all ignored or masked is 0 / 0. Check for a "
        "logarithm of 0.",
    )


def _parameter_hit(profile: Profile, run: Run, parameters: list[str]) -> Hit:
    more = f" and {count(len(parameters) - 1, 'more parameter')}" if len(parameters) > 1 else ""
    gradients, verb = ("gradients", "are") if more else ("gradient", "is")
    return Hit(
        sites=(),
        place=Place(parameter=parameters[0]),
        metric="grad_state",
        value="nonfinite",
        expected="finite",
        message=f"The {gradients} of {parameters[0]}{more} {verb} NaN or infinite, although the gradient of the stream is "
        f"finite at every site.{made_by(first_origin(run, profile.sites, 'backward'))}",
    )
