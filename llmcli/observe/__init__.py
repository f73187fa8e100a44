"""What measuring shares: taps, clocks, ceilings, memory, statistics, checks."""
