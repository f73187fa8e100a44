"""`llmcli chat`: a conversation."""
