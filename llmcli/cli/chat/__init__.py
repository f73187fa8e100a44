"""`llmcli chat`: a conversation with a model."""
