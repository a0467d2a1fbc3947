"""Build a model without allocating it: record its constructor, then replay any one parameter."""
