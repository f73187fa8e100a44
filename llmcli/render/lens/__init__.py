"""What each layer would have said: on a screen, and in files."""
