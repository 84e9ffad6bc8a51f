"""The algorithm: no model code, no I/O."""
