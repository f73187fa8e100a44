"""The algebra of models: nodes, ops, and how each op is evaluated."""
