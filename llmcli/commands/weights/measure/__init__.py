"""The ladder: the same model eight times, from loops over vectors to fused kernels."""
