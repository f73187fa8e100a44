"""Shapes from the graph, compared with what a run holds."""
