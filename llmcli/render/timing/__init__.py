"""Where the time of a run goes, as tables and sentences."""
