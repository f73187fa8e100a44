"""Attention on a terminal and in files."""
