"""What computes the parts of models, a file for each; `graph.parts` describes their tensors."""
