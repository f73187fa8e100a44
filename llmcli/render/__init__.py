"""Reports turned into something to look at, with rich; never torch, never a number of its own."""
