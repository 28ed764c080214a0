"""Processes, streams, in-flight requests, supervision. Knows nothing of reinforcement learning."""
