"""The Hugging Face hub: queries, choice of a model's files, downloads. No torch."""
