"""Kernels in C, each the fast version of an operation; `llmcli.ops` decides when one runs."""
