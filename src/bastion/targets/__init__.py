"""Models that verify."""
