"""`llmcli score`: log-probabilities and perplexity."""
