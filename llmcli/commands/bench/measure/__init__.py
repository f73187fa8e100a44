"""Tests of speed, ours and of peers."""
