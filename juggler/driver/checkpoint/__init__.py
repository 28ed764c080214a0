"""Snapshots of a run's state, and runs that resume from one."""
