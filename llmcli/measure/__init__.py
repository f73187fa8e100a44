"""Runs something and returns a dataclass with what it found; never prints."""
