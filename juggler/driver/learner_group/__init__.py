"""Learners for a script: many modules on many devices."""
