"""Weights: one interface to products and look-ups, whatever format the numbers are kept in."""
