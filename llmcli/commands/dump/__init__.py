"""`llmcli dump`: any activation by name."""
