"""APPO."""
