"""Rewards for new observations, with any algorithm."""
