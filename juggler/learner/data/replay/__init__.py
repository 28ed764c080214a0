"""Replay: samples that are kept, and drawn from repeatedly."""
