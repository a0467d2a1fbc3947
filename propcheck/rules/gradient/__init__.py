"""Rules of the gradient: PC301 to PC306."""

from propcheck.rules.gradient import (
    dead_gradient,
    exploding_gradient,
    gradient_step,
    no_gradient,
    nonfinite_gradient,
    vanishing_gradient,
)

RULES = (
    exploding_gradient.RULE,
    vanishing_gradient.RULE,
    dead_gradient.RULE,
    no_gradient.RULE,
    nonfinite_gradient.RULE,
    gradient_step.RULE,
)
