"""Benchmarks: what llama-bench measures, and what it leaves out."""
