"""The rows of each part: its tensors, formulas, parameters and state. No torch."""
