"""Minari data sets on this host, to read."""
