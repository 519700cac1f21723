"""Hidden states and head of a model, read from its traced forward."""
