"""Environments in which several agents act, and the sampling of their steps."""
