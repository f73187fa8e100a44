"""The logit lens on a terminal and in files."""
