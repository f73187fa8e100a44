"""Kernels for one row on a card: twins of operations in `ops`, loaded only where Triton is."""
