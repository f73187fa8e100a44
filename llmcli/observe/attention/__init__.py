"""Rows of attention maps, each proven while it is there."""
