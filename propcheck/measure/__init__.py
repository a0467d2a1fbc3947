"""Measure what the tracer sees: statistics, gradients, norms, attention, the fp32 reference and non-finite values."""
