"""The gated delta rule behind a short convolution."""
