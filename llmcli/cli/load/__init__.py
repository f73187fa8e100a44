"""`llmcli load`: what becomes of every tensor of a model."""
