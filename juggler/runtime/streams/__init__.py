"""Streams of episodes and of weights."""
