"""Plain data that commands, measurements and views exchange. No torch, no rich."""
