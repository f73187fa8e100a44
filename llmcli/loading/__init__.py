"""From the name of a model to a model that runs: its tensors into parameters, by rules."""
