"""Optimizers, their groups of parameters, and their schedules."""
