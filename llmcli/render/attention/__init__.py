"""What heads attend to: on a screen, and in files."""
