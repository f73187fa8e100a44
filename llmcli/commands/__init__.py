"""The commands that own their slices: a folder each."""
