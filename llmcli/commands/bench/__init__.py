"""`llmcli bench`: how fast a model runs."""
