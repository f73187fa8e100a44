"""Loads a model by its name: fills parameters from its tensors, by rules."""
