"""Rows that fill at the pace of their own agent, and the policy that acts for these agents."""
