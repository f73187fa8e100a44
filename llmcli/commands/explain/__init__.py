"""`llmcli explain`: one number derived step by step."""
