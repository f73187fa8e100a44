"""The graph of a model: nodes and their operations, names, work, memory, shares. No torch."""
