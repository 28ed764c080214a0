"""Environments with one agent, and vectors of them."""
