"""A feed-forward of two experts."""
