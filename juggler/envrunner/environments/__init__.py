"""Environments, one or many at once."""
