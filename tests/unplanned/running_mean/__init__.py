"""A causal running mean with a learned decay per head."""
