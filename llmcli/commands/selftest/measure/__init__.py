"""Properties of the arithmetic over small models, and rates of large ones."""
