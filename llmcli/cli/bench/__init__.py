"""`llmcli bench`: tests and formats of llama-bench, and more numbers."""
