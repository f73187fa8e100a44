"""Embeddings and the output head."""
