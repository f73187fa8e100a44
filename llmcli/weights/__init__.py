"""Weights: one interface to products and lookups for all storage formats."""
