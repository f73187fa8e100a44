"""What measurements share: engines and peers, runs, ceilings, memory, the machine."""
