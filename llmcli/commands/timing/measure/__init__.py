"""Clocks around every operation, and what they add up to."""
