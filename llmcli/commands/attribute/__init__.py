"""`llmcli lens`: the logit lens."""
