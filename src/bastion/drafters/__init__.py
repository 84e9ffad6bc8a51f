"""Models that guess."""
