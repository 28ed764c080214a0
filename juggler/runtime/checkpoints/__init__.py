"""Reads and writes checkpoints, without the rest of a run."""
