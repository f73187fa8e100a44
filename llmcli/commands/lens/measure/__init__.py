"""The logit lens, computed and checked."""
