"""The algebra of models: nodes, ops, and the evaluation of each op."""
