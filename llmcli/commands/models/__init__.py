"""`llmcli models`: the models on this machine."""
