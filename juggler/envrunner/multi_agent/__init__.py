"""Environments with several agents, and the sampling of their steps."""
