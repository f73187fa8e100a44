"""What the commands that look inside a model share: taps, layers, checks, statistics."""
