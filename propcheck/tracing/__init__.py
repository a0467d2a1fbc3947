"""Follow tensors through a forward pass and find the residual additions."""
