"""What `llmcli weights` measures."""
