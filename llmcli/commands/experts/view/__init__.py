"""Choices of experts on a terminal and in files."""
