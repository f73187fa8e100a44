"""The parts of models, one folder each, with a description of their tensors."""
