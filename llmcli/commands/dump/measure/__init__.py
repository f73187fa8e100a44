"""Activations by name, written and summarized while they are computed."""
