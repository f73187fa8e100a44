"""Rows of attention maps, each checked while it is there."""
