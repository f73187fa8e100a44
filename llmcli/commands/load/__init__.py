"""`llmcli load`: what became of every tensor."""
