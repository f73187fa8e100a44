"""Run language models in the terminal and see exactly what they compute."""

__version__ = "0.1.0"
