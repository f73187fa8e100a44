"""Sequences of tokens: sessions, sampling, stop strings, text streams, conversations."""
