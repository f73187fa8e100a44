"""`llmcli experts`: which experts every token takes."""
