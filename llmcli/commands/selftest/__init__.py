"""`llmcli selftest`: is this machine's arithmetic right, and how fast is it."""
