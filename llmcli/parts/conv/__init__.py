"""The gated short convolution."""
