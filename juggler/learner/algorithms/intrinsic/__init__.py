"""Rewards for what is new, around any algorithm."""
