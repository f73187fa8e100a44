"""The parts of models, a folder each: what a part knows of its own tensors."""
