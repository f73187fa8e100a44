"""The rows of `bench` on a terminal and in its formats."""
