"""The decoder: blocks of parts, recorded and captured steps."""
