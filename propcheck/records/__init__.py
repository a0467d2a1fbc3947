"""Records of a scan: plain frozen dataclasses that the engine fills and that rules, analysis and views read.

Nothing here needs torch, so all of it works on a run that was just made and on one that was read from disk.

Units: every ``*_rms`` is sqrt(mean of squares) over all elements. An activation ``*_norm`` is the root of the mean over tokens
of the squared L2 norm, so norm = rms * sqrt(width). A gradient norm is the Frobenius norm over the batch. ``None`` means "does
not apply" or "not observed"; a computed NaN or infinity is kept.
"""

from propcheck.records.finding import SEVERITIES, FailLevel, Finding, Place, Severity, failing
from propcheck.records.growth import Growth, Law, StreamGrowth
from propcheck.records.norm import NormKind, NormPlace, NormRecord
from propcheck.records.parameter import GradState, ParameterRecord
from propcheck.records.run import (
    PATH_SETTINGS,
    SCHEMA_VERSION,
    Angle,
    Doubling,
    EngineInfo,
    InputInfo,
    LossInfo,
    ModelInfo,
    Origin,
    Run,
)
from propcheck.records.site import SiteRecord, Sublayer

__all__ = [
    "PATH_SETTINGS",
    "SCHEMA_VERSION",
    "SEVERITIES",
    "Angle",
    "Doubling",
    "EngineInfo",
    "FailLevel",
    "Finding",
    "GradState",
    "Growth",
    "InputInfo",
    "Law",
    "LossInfo",
    "ModelInfo",
    "NormKind",
    "NormPlace",
    "NormRecord",
    "Origin",
    "ParameterRecord",
    "Place",
    "Run",
    "Severity",
    "SiteRecord",
    "StreamGrowth",
    "Sublayer",
    "failing",
]
