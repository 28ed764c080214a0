"""Cuts of a run's state, and runs that go on from one."""
