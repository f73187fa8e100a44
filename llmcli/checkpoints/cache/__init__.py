"""Models stored on this machine: listing, lookup by name, removal. No torch."""
