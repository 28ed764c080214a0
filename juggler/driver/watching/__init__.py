"""Watches runs from outside, by reading their directories."""
