"""`llmcli diff`: two models, or one model in two ways."""
