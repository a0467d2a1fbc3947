"""Rules of the residual stream and its branches: PC201 to PC212."""

from propcheck.rules.stream import (
    activation_range,
    broken_residual,
    collapse,
    dead_branch,
    dominant_update,
    dtype_drift,
    epsilon_dominated,
    explosion,
    nonfinite_activation,
    residual_discontinuity,
    swallowed_update,
    token_collapse,
)

RULES = (
    explosion.RULE,
    collapse.RULE,
    dead_branch.RULE,
    dominant_update.RULE,
    residual_discontinuity.RULE,
    broken_residual.RULE,
    swallowed_update.RULE,
    epsilon_dominated.RULE,
    nonfinite_activation.RULE,
    token_collapse.RULE,
    dtype_drift.RULE,
    activation_range.RULE,
)
