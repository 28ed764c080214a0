"""Columnar episodes and their place on the wire."""
