"""What a run measures: every metric by its name."""
