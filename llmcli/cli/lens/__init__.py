"""`llmcli lens`: what each layer would have said."""
