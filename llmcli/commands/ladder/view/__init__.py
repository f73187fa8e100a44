"""The ladder as text and as an image."""
