"""What parts share: linear layers, parameters, state, the facts of one call."""
