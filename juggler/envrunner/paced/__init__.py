"""Rows that fill at the pace of their own agent."""
