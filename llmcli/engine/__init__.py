"""Sequences of tokens: sessions, sampling, stop strings, streams of text, conversations."""
