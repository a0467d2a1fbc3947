"""Build a model without its memory: record the constructor, replay any one parameter."""
