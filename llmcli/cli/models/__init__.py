"""`llmcli models` and its five commands: what is on this machine, fetched and removed."""
