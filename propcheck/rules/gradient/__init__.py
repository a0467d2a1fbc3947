"""Rules of the gradient: PC301 to PC306."""

from propcheck.rules import backward, dead, steps
from propcheck.rules.gradient import no_gradient

RULES = (*backward.RULES, *dead.RULES, *steps.RULES, no_gradient.RULE)
