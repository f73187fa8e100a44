"""Parameters and wiring: one class per idea, the mathematics is in `ops/`."""
