"""Two parts that nothing in `llmcli` knows: a folder each, and a model of them."""
