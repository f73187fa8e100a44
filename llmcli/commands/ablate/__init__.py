"""`llmcli ablate`: what changes without a head, an MLP, an expert or a layer."""
