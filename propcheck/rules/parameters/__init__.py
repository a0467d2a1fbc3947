"""Rules of the parameters: PC101 to PC106."""

from propcheck.rules.parameters import (
    init_outliers,
    init_scale,
    nonfinite_parameter,
    norm_gain,
    symmetric_units,
    uninitialized_parameter,
)

RULES = (
    nonfinite_parameter.RULE,
    uninitialized_parameter.RULE,
    symmetric_units.RULE,
    init_scale.RULE,
    init_outliers.RULE,
    norm_gain.RULE,
)
