"""Pure tensor functions, without parameters and without state. Axes: see each file's legend."""
