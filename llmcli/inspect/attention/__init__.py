"""Rows of attention maps, each checked as it is computed."""
