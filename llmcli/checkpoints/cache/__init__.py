"""What models lie on this machine: listed, looked up by name, and removed. No torch."""
