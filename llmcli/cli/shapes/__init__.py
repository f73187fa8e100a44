"""`llmcli shapes`: every tensor of a model."""
