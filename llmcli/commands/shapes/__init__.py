"""`llmcli shapes`: every tensor."""
