"""What measurements share: clocks, ceilings, memory, the machine."""
