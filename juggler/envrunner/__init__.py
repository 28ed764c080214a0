"""Environments, and the loop that turns them into episodes."""
