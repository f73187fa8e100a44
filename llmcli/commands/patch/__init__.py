"""`llmcli patch`: what restores an answer."""
