"""Worlds, scripted parts and programs for several rooms' tests."""
