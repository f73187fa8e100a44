"""`llmcli help`: topics, and the help of commands."""
