"""Algorithms that ship: a folder for each."""
