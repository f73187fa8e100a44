"""Embeddings for each layer, and the part of a block that they enter."""
