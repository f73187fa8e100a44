"""Metrics, matrices, pairs and states of heads, and the proof of each number."""
