"""One file a rung: what it changes in the walk, or in the rung below."""
