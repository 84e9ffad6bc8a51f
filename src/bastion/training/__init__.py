"""Making data with a target, and training drafters on it."""
