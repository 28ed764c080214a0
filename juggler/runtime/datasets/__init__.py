"""Reads Minari data sets on this host."""
