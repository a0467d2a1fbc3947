"""Rules of the residual stream and its branches: PC201 to PC212."""

from propcheck.rules import forward, jumps, nonfinite, precision, ranges, residual, tokens
from propcheck.rules.stream import epsilon_dominated

RULES = (
    *forward.RULES,
    *jumps.RULES,
    *nonfinite.RULES,
    *precision.RULES,
    *ranges.RULES,
    *residual.RULES,
    *tokens.RULES,
    epsilon_dominated.RULE,
)
