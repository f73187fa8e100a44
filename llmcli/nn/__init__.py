"""Parameters and wiring of the decoder; the mathematics is in `ops/`."""
