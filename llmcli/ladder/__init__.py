"""The same model eight times, from nested loops over vectors up to fused kernels.

One file a rung; each is a complete forward pass with the same weights and reads on its own. A
rung changes one formula of the rung below and must give the same logits, to rounding.
"""
