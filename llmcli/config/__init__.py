"""A model's configuration: frozen values of each part and of the whole. No torch."""
