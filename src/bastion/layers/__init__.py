"""Building blocks shared by targets and drafters."""
