"""Plain data exchanged by commands, measurements and views. No torch, no rich."""
