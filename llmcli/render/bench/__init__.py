"""Rows of a benchmark in llama-bench's formats, and what we measure beside them."""
