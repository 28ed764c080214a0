"""Trackers of experiments, each a file, behind one seam."""
