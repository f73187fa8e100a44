"""`llmcli attribute`: what adds up to a logit."""
