"""The table of tensors and the table of names."""
