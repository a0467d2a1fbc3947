"""Find the residual additions of a model and measure them, forward and backward."""
