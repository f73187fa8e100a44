"""What measuring attention returns."""
