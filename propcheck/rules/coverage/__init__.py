"""Rules of coverage, what the forward pass left out and the scan could not follow: PC501 to PC503."""

from propcheck.rules.coverage import no_residual_stream, unobserved, unused_module

RULES = (unused_module.RULE, no_residual_stream.RULE, unobserved.RULE)
