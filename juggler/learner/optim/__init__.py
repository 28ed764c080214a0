"""Optimizers, the groups of parameters that they train, and their schedules."""
