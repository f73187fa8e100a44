"""Times by phase, part and layer."""
