"""Per-layer embeddings, and the part of a block that uses them."""
