"""The hub: what it answers, which of its files are a model, and how they are fetched. No torch."""
