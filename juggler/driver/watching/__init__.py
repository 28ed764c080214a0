"""Watches runs from outside, by what their directories have."""
