"""`llmcli generate`: text, token by token."""
