"""`llmcli info`: what a model is."""
