"""The listeners that measure one pass, and their measurements per site."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from propcheck.measure.attention import AttentionMeasurer
from propcheck.measure.norms import NormMeasurer
from propcheck.measure.placements import read_norm
from propcheck.measure.rotary_precision import AngleMeasurer
from propcheck.measure.site_measurements import AdditionMeasurer, GradientMeasurer
from propcheck.tracing.events import Listener, PassListeners
from propcheck.tracing.sites import Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from propcheck.measure.attention import AttentionStatistics
    from propcheck.measure.fp32_reference import Spool
    from propcheck.measure.norms import NormMeasurement
    from propcheck.measure.statistics import AdditionStatistics
    from propcheck.tracing.events import GradientOf


@dataclass(slots=True)
class MeasuredSite(Site):
    """A site with what was measured; tensors are 0-d and still on the device."""

    statistics: AdditionStatistics
    gradients: dict[GradientOf, Tensor]  # norms
    read_norm: NormMeasurement | None  # of the norm that the branch reads the stream through
    attentions: tuple[AttentionStatistics, ...]


class UnobservedModules(Listener):
    """Collects the modules that the tracer could not follow, with the first reason of each."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def not_followed(self, module: str, reason: str) -> None:
        """Note a module."""
        self._reasons.setdefault(module, reason)

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence per module."""
        return tuple(f"{module}: {reason}" for module, reason in self._reasons.items())


class PassMeasurers:
    """Measures one pass.

    Parameters
    ----------
    masks
        Of real positions, as ``padding_masks`` returns them.
    spool
        Keeps the values and gradients of the additions, for a comparison with another pass.
    """

    def __init__(self, masks: tuple[Tensor, ...] = (), spool: Spool | None = None) -> None:
        self.additions = AdditionMeasurer(masks)
        self.gradients = GradientMeasurer(masks, None if spool is None else spool.gradient)
        self.norms = NormMeasurer(masks)
        self.attentions = AttentionMeasurer(masks)
        self.angles = AngleMeasurer()
        self.unobserved = UnobservedModules()
        self._kept = () if spool is None else (spool,)

    def listeners(self, *everywhere: Listener) -> PassListeners:
        """Return the listeners of the pass, with others that listen to every part of it."""
        values = (*self._kept, self.additions, self.norms, self.attentions, self.angles, self.unobserved)
        return PassListeners(everywhere, values, (self.gradients,))

    def sites(self, sites: Sequence[Site], loss_scale: float = 1.0) -> tuple[MeasuredSite, ...]:
        """Return the sites with their measurements; gradients are divided by the loss scale."""
        return tuple(
            MeasuredSite(
                **{field.name: getattr(site, field.name) for field in fields(site)},
                statistics=self.additions.statistics[site.addition][site.part],
                gradients={name: norm / loss_scale for name, norm in self._gradients_at(site).items()},
                read_norm=None if (norm := read_norm(site)) is None else self.norms.measured[norm],
                attentions=tuple(self.attentions.statistics[step] for step in site.branch.attentions),
            )
            for site in sites
        )

    def _gradients_at(self, site: Site) -> dict[GradientOf, Tensor]:
        """Return the gradients at a site; all sites of a parallel block share the first stream and the last sum."""
        norms = self.gradients.norms
        gradients = dict(norms.get(site.addition, {}))
        for name, addition in (("stream", site.addition.first), ("sum", site.last)):
            if name in norms.get(addition, {}):
                gradients[name] = norms[addition][name]
        return gradients
