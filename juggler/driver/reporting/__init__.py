"""Metrics, run directory and display of a run."""
