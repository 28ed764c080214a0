"""Replay: samples that are kept, and drawn from again and again."""
