"""The settings of a run: which there are, of which type, and how values become a configuration."""
