"""GPU kernels for few rows, equivalents of operations in `ops`; need Triton."""
