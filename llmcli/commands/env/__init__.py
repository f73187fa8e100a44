"""`llmcli env`: this machine and where each setting comes from."""
