"""`llmcli timing`: where the time goes."""
