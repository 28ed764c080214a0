"""Modules that act on NumPy arrays, which for a few rows takes a fraction of torch's time."""
