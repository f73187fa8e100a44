"""`llmcli weights`: what the parameters themselves say, without a prompt."""
