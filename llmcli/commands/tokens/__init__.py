"""`llmcli tokens`: the tokens of a text."""
