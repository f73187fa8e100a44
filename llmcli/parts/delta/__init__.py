"""The gated delta rule after a short convolution."""
