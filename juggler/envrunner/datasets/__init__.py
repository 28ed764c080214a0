"""Data sets of episodes: found, read, played again, and written."""
