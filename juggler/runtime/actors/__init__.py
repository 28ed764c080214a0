"""Processes, streams, requests in flight and supervision, without reinforcement learning."""
