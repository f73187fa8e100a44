"""The command line: one thin file per command; numbers come from measure/, looks from render/."""
