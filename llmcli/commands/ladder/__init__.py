"""`llmcli ladder`."""
