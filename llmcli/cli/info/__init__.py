"""`llmcli info`: what a model is, and whether it fits."""
