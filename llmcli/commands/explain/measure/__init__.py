"""One number of a model, derived step by step from the prompt's own values."""
