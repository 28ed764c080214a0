"""Learners that update together."""
